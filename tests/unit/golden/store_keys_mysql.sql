CREATE TABLE native_delay_key (
	namespace VARCHAR(64) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	record TEXT NOT NULL, 
	kept_us BIGINT NOT NULL, 
	PRIMARY KEY (namespace, name)
);
