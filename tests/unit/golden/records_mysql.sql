CREATE TABLE native_delay_record (
	owner VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	digest VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	text LONGTEXT NOT NULL, 
	kept_us BIGINT NOT NULL, 
	PRIMARY KEY (owner, kind, digest)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX native_delay_record_kept ON native_delay_record (owner, kind, kept_us);
