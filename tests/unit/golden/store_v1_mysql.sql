CREATE TABLE native_delay_message (
	id BIGINT NOT NULL AUTO_INCREMENT, 
	namespace VARCHAR(64) NOT NULL, 
	due_us BIGINT, 
	queue TEXT NOT NULL, 
	envelope LONGTEXT NOT NULL, 
	task_id VARCHAR(255) NOT NULL, 
	attempts SMALLINT NOT NULL DEFAULT '0', 
	reason TEXT, 
	PRIMARY KEY (id)
);
CREATE INDEX native_delay_message_due ON native_delay_message (namespace, due_us);
CREATE INDEX native_delay_message_task ON native_delay_message (namespace, task_id);
