BEGIN TRANSACTION;
CREATE TABLE native_delay_record (
	owner VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	digest VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	text TEXT NOT NULL, 
	kept_us BIGINT NOT NULL, 
	PRIMARY KEY (owner, kind, digest)
);
INSERT INTO "native_delay_record" VALUES('celery_delay./','lease','ef069476dcfad1b2e29de03c4fb8fc39','dispatching','9f00 1700000000000000',1700000000000000);
INSERT INTO "native_delay_record" VALUES('celery_delay./','key','c084a91e6a8a4eb28f364b50f6ae04a1','unique:shop.remind:ada','{"v":1,"runs":[["5f2b","9a3e",1795165200000000,0]]}',100000000000000000);
INSERT INTO "native_delay_record" VALUES('celery_delay./','cancelled','0a9b06839b1bc5973f66d1299e9cd020','in the broker','1',101795847154213083);
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
INSERT INTO "native_delay_task" VALUES(1,'celery_delay./','855e3efbe1cb9e9e66fbf83fcc3f9bc9','parked',2,101795847154137461,NULL,1,'no queue eu','[1,1,"","eu","eu",null,"parked",false,{"application_headers":{"lang":"py","task":"shop.remind","id":"parked","eta":"2026-11-20T09:00:00+00:00","expires":"2026-11-21T09:00:00+00:00","retries":1,"argsrepr":"(''ada'',)"}}]
[["ada"], {"order": "№ 7"}, {"callbacks": null}]');
INSERT INTO "native_delay_task" VALUES(2,'celery_delay./','3d776bd312ab860560b802fcb2f4cfa4','taken',1,1700000000000000,'3a5c9b81bf368ec66e1808d625e381cb',0,NULL,'[1,1,"","eu","eu",null,"taken",false,{"application_headers":{"lang":"py","task":"shop.remind","id":"taken","eta":"2026-11-20T09:00:00+00:00","expires":"2026-11-21T09:00:00+00:00","retries":1,"argsrepr":"(''ada'',)"}}]
[["ada"], {"order": "№ 7"}, {"callbacks": null}]');
INSERT INTO "native_delay_task" VALUES(3,'celery_delay./','93c131fd21a90e9ad07a2127bc8c94e7','waiting',0,100000000000000000,NULL,0,NULL,'[1,100000000000000000,"","eu","eu",null,"waiting",false,{"application_headers":{"lang":"py","task":"shop.remind","id":"waiting","eta":"2026-11-20T09:00:00+00:00","expires":"2026-11-21T09:00:00+00:00","retries":1,"argsrepr":"(''ada'',)"}}]
[["ada"], {"order": "№ 7"}, {"callbacks": null}]');
INSERT INTO "native_delay_task" VALUES(4,'celery_delay./','2703772c5ab1eba11c69f3f59309f5da','cancelled',3,1700000000000000,NULL,0,NULL,'[1,1700000000000000,"","eu","eu",null,"cancelled",true,{"application_headers":{"lang":"py","task":"shop.remind","id":"cancelled","eta":"2026-11-28T06:25:54.156902+00:00","expires":"2026-11-21T09:00:00+00:00","retries":1,"argsrepr":"(''ada'',)"}}]
[["ada"], {"order": "№ 7"}, {"callbacks": null}]');
CREATE INDEX native_delay_task_next ON native_delay_task (namespace, state, next_us);
CREATE INDEX native_delay_task_id ON native_delay_task (namespace, task_id);
CREATE UNIQUE INDEX native_delay_task_name ON native_delay_task (namespace, digest);
CREATE INDEX native_delay_record_kept ON native_delay_record (owner, kind, kept_us);
COMMIT;
