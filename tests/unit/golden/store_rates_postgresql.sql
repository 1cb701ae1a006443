CREATE TABLE native_delay_rate (
	namespace VARCHAR(64) NOT NULL, 
	digest VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	record VARCHAR(255) NOT NULL, 
	starts TEXT NOT NULL, 
	ends_us BIGINT NOT NULL, 
	PRIMARY KEY (namespace, digest)
);
CREATE INDEX native_delay_rate_ends ON native_delay_rate (namespace, ends_us);
