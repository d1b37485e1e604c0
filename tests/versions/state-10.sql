BEGIN TRANSACTION;
CREATE TABLE deployment (
    id TEXT NOT NULL, issue INTEGER NOT NULL, device TEXT NOT NULL, run TEXT NOT NULL, version INTEGER NOT NULL,
    architecture TEXT NOT NULL, precision TEXT NOT NULL, sha256 TEXT NOT NULL, length INTEGER NOT NULL,
    input TEXT NOT NULL, classes_sha256 TEXT NOT NULL, state TEXT NOT NULL, code TEXT NOT NULL, detail TEXT NOT NULL,
    created_s INTEGER NOT NULL, PRIMARY KEY (id, device)
) STRICT;
CREATE TABLE device (name TEXT PRIMARY KEY, key TEXT NOT NULL, password TEXT NOT NULL, labels TEXT NOT NULL) STRICT;
INSERT INTO "device" VALUES('a','ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb','password-of-a','{}');
CREATE TABLE evaluation (
    run TEXT NOT NULL, version INTEGER NOT NULL, device TEXT NOT NULL, num_samples INTEGER NOT NULL,
    num_correct INTEGER NOT NULL, loss_sum REAL NOT NULL, confusion TEXT NOT NULL, slice TEXT NOT NULL DEFAULT 'full',
    PRIMARY KEY (run, version, device, slice)
) STRICT;
INSERT INTO "evaluation" VALUES('r-1',0,'a',10,7,3.5,'[4,1,2,3]','full');
CREATE TABLE lease (
    issue INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL, run TEXT NOT NULL,
    round INTEGER NOT NULL, attempt INTEGER NOT NULL, device TEXT NOT NULL, train INTEGER NOT NULL,
    evaluate INTEGER NOT NULL, version INTEGER NOT NULL, plan TEXT, state TEXT NOT NULL, code TEXT NOT NULL,
    detail TEXT NOT NULL, log TEXT NOT NULL, slice TEXT NOT NULL DEFAULT 'full',
    moments TEXT NOT NULL DEFAULT '{}', phases TEXT NOT NULL DEFAULT '{}'
) STRICT;
INSERT INTO "lease" VALUES(1,'lease-1',7,'r-1',1,1,'a',1,1,0,NULL,'stored','','','[]','full','{}','{}');
INSERT INTO "lease" VALUES(2,'lease-2',7,'r-1',1,1,'b',0,1,0,NULL,'offered','','','[]','full','{}','{}');
CREATE TABLE left_out (
    run TEXT NOT NULL, device TEXT NOT NULL, code TEXT NOT NULL, round INTEGER NOT NULL, detail TEXT NOT NULL,
    PRIMARY KEY (run, device, code)
) STRICT;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO "meta" VALUES('federation','fed');
CREATE TABLE model (
    run TEXT NOT NULL REFERENCES run(id), version INTEGER NOT NULL, sha256 TEXT NOT NULL, length INTEGER NOT NULL,
    sent_sha256 TEXT NOT NULL, sent_length INTEGER NOT NULL, set_hash TEXT NOT NULL, score REAL,
    PRIMARY KEY (run, version)
) STRICT;
INSERT INTO "model" VALUES('r-1',0,'798f5c0a21a0f244d168cfbb8664f7f650383254fc693c9bfcd401f463707404',100,'798f5c0a21a0f244d168cfbb8664f7f650383254fc693c9bfcd401f463707404',100,'',NULL);
CREATE TABLE page_action (
    id INTEGER PRIMARY KEY, at_s INTEGER NOT NULL, name TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
) STRICT;
CREATE TABLE page_session (
    sha256 TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, csrf TEXT NOT NULL, expires_s INTEGER NOT NULL
) STRICT;
CREATE TABLE page_token (
    name TEXT PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, role TEXT NOT NULL, created_s INTEGER NOT NULL,
    used_s INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE part (
    run TEXT NOT NULL REFERENCES run(id), version INTEGER NOT NULL, slice TEXT NOT NULL, sha256 TEXT NOT NULL,
    length INTEGER NOT NULL, PRIMARY KEY (run, version, slice)
) STRICT;
CREATE TABLE round (
    run TEXT NOT NULL REFERENCES run(id), number INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
    goal INTEGER NOT NULL, quorum INTEGER NOT NULL, remaining_s REAL NOT NULL, extended INTEGER NOT NULL,
    reason TEXT NOT NULL, set_hash TEXT NOT NULL DEFAULT '', elapsed_s REAL NOT NULL DEFAULT 0,
    bytes_up INTEGER, bytes_down INTEGER, num_available INTEGER NOT NULL DEFAULT 0,
    moments TEXT NOT NULL DEFAULT '{}', PRIMARY KEY (run, number, attempt)
) STRICT;
INSERT INTO "round" VALUES('r-1',1,1,'RUNNING',2,2,60.0,0,'','',0.0,NULL,NULL,0,'{}');
CREATE TABLE run (
    id TEXT PRIMARY KEY, file TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    settings_sha256 TEXT NOT NULL, settings_length INTEGER NOT NULL, task_sha256 TEXT NOT NULL DEFAULT '',
    dry INTEGER NOT NULL DEFAULT 0, best_version INTEGER, environment TEXT NOT NULL DEFAULT '{}',
    created_s INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO "run" VALUES('r-1','{"name":"r","seed":1,"method":{"name":"fedavg","parameters":{}},"model":{"name":"mlp","input":[1,2,2],"init":"random","options":{}},"task":null,"classes":["no","yes"],"slices":[],"models":{},"sharing":"auto","train":{"batch":32,"epochs":1,"max_steps":null,"optimizer":"sgd","lr":0.05,"momentum":0.0,"weight_decay":0.0,"schedule":"constant","dtype":"fp32","threads":1},"stop":{"rounds":10,"metric":"accuracy","target":null,"patience":null,"hours":null},"devices":{"min":1,"fraction":1.0,"where":[],"misfit":"skip","max_samples":10000000,"max_weight_ratio":10},"rounds":{"deadline":1800.0,"codec":"fp32","max_norm_ratio":20.0},"evaluate":{"on":"devices","every":1,"similarity":10},"simulate":null}','running','','cde0fb0dec1400c54a0f7e7eafa73624c53e4da258bbd34b3380a0defeba95c1',8,'',0,NULL,'{}',0);
CREATE TABLE run_device (
    run TEXT NOT NULL, device TEXT NOT NULL, info TEXT NOT NULL, PRIMARY KEY (run, device)
) STRICT;
INSERT INTO "run_device" VALUES('r-1','a','{"client":"0.1.0"}');
CREATE TABLE traffic (
    run TEXT NOT NULL, device TEXT NOT NULL, up INTEGER NOT NULL, down INTEGER NOT NULL, PRIMARY KEY (run, device)
) STRICT;
CREATE TABLE update_ (
    run TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, device TEXT NOT NULL,
    lease TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL, length INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    norm REAL NOT NULL, report TEXT NOT NULL, PRIMARY KEY (run, round, attempt, device)
) STRICT;
INSERT INTO "update_" VALUES('r-1',1,1,'a','lease-1','7b7fb7ba942ce006a1f984d818b12e9d6fa3fba5b4bc29f72d686990a20b2a9e',50,10,1.5,'{"num_samples":10,"num_held":0,"num_test":0,"steps":2,"payload":"params","plan":{"slice":"full","groups":[],"skipped":[],"microbatch":8,"recompute":null,"channels_last":false,"dtype":"fp32","buffered":false,"num_models":1,"budget_bytes":1000000000,"predicted_bytes":100000000,"training_bytes":0},"peak_bytes":0,"base_bytes":0,"seconds":0.0,"scalars":{},"versions":{},"evaluation":null}');
CREATE INDEX lease_round ON lease (run, round, attempt);
CREATE INDEX lease_device ON lease (device, issue);
CREATE INDEX update_device ON update_ (run, device, round);
CREATE INDEX round_open ON round (run, number, attempt) WHERE state IN ('RUNNING', 'FROZEN');
CREATE INDEX lease_device_failed ON lease (device, issue) WHERE state IN ('declined', 'refused', 'expired');
CREATE INDEX lease_run_failed ON lease (run, issue) WHERE state IN ('declined', 'refused', 'expired');
COMMIT;
PRAGMA user_version = 10;
