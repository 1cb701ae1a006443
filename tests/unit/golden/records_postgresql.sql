CREATE TABLE native_delay_mark (
	owner VARCHAR(64) NOT NULL, 
	delivery_id VARCHAR(64) NOT NULL, 
	mark VARCHAR(16) NOT NULL, 
	kept_us BIGINT NOT NULL, 
	PRIMARY KEY (owner, delivery_id)
);
CREATE INDEX native_delay_mark_kept ON native_delay_mark (owner, kept_us);
CREATE TABLE native_delay_record (
	owner VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	digest VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	text TEXT NOT NULL, 
	kept_us BIGINT NOT NULL, 
	PRIMARY KEY (owner, kind, digest)
);
CREATE INDEX native_delay_record_kept ON native_delay_record (owner, kind, kept_us);
CREATE TABLE native_delay_waiting (
	owner VARCHAR(64) NOT NULL, 
	delivery_id VARCHAR(64) NOT NULL, 
	due_us BIGINT NOT NULL, 
	task_id VARCHAR(255) NOT NULL, 
	entry TEXT NOT NULL, 
	PRIMARY KEY (owner, delivery_id)
);
CREATE INDEX native_delay_waiting_due ON native_delay_waiting (owner, due_us);
CREATE INDEX native_delay_waiting_task ON native_delay_waiting (owner, task_id);
