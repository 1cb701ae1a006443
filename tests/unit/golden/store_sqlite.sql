CREATE TABLE native_delay_task (
	id INTEGER NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	digest VARCHAR(32) NOT NULL, 
	task_id VARCHAR(255) NOT NULL, 
	state SMALLINT NOT NULL, 
	next_us BIGINT NOT NULL, 
	taken_by VARCHAR(32), 
	refusals SMALLINT NOT NULL, 
	reason TEXT, 
	entry TEXT NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX native_delay_task_id ON native_delay_task (namespace, task_id);
CREATE UNIQUE INDEX native_delay_task_name ON native_delay_task (namespace, digest);
CREATE INDEX native_delay_task_next ON native_delay_task (namespace, state, next_us, id);
