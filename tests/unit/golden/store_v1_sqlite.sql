CREATE TABLE native_delay_message (
	id INTEGER NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	due_us BIGINT, 
	queue TEXT NOT NULL, 
	envelope TEXT NOT NULL, 
	task_id VARCHAR(255) NOT NULL, 
	attempts SMALLINT DEFAULT '0' NOT NULL, 
	reason TEXT, 
	PRIMARY KEY (id)
);
CREATE INDEX native_delay_message_due ON native_delay_message (namespace, due_us);
CREATE INDEX native_delay_message_task ON native_delay_message (namespace, task_id);
