-- The tuning log, version 1. docs/log.md describes it. Times are microseconds (_us) or seconds (_s), timestamps UTC ISO 8601 text.
-- digest columns are the identities that raftune computes; spec, config, settings and result columns hold JSON.

CREATE TABLE device (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    model TEXT NOT NULL,
    cores INTEGER NOT NULL,
    threads INTEGER NOT NULL,
    spec TEXT NOT NULL
);

CREATE TABLE workload (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    op TEXT NOT NULL,
    spec TEXT NOT NULL
);

CREATE TABLE candidate (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    dialect TEXT NOT NULL,
    version TEXT NOT NULL,
    config TEXT NOT NULL
);

CREATE TABLE policy (
    id INTEGER PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    margin REAL NOT NULL,
    spec TEXT NOT NULL
);

-- One start of the tuner. Runs of one key share one budget.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    settings TEXT NOT NULL,
    started_at TEXT NOT NULL
);
CREATE INDEX run_by_key ON run (key);

CREATE TABLE task (
    run_id INTEGER NOT NULL REFERENCES run (id),
    workload_id INTEGER NOT NULL REFERENCES workload (id),
    weight REAL NOT NULL,
    PRIMARY KEY (run_id, workload_id)
);

-- What PyTorch would run for a workload; one candidate for each version of the default dialect that was ever used.
CREATE TABLE default_candidate (
    workload_id INTEGER NOT NULL REFERENCES workload (id),
    candidate_id INTEGER NOT NULL REFERENCES candidate (id),
    PRIMARY KEY (workload_id, candidate_id)
);

-- One outcome of one candidate, failures included. Rows are only ever added.
CREATE TABLE measurement (
    id INTEGER PRIMARY KEY,
    workload_id INTEGER NOT NULL REFERENCES workload (id),
    candidate_id INTEGER NOT NULL REFERENCES candidate (id),
    device_id INTEGER NOT NULL REFERENCES device (id),
    policy_id INTEGER NOT NULL REFERENCES policy (id),
    run_id INTEGER REFERENCES run (id),
    status TEXT NOT NULL,
    time_us REAL,
    low_us REAL,
    high_us REAL,
    repeats INTEGER NOT NULL,
    max_error REAL,
    build_s REAL NOT NULL,
    cost_s REAL NOT NULL,
    message TEXT NOT NULL,
    recorded_at TEXT NOT NULL
);
CREATE INDEX measurement_by_key ON measurement (workload_id, device_id, candidate_id);
CREATE INDEX measurement_by_run ON measurement (run_id);

-- One candidate against the default, timed in turns in one process.
CREATE TABLE rematch (
    id INTEGER PRIMARY KEY,
    workload_id INTEGER NOT NULL REFERENCES workload (id),
    candidate_id INTEGER NOT NULL REFERENCES candidate (id),
    default_id INTEGER NOT NULL REFERENCES candidate (id),
    device_id INTEGER NOT NULL REFERENCES device (id),
    policy_id INTEGER NOT NULL REFERENCES policy (id),
    run_id INTEGER REFERENCES run (id),
    status TEXT NOT NULL,
    time_us REAL,
    default_us REAL,
    ratio REAL,
    ratio_high REAL,
    rounds INTEGER NOT NULL,
    message TEXT NOT NULL,
    cost_s REAL NOT NULL,
    recorded_at TEXT NOT NULL
);
CREATE INDEX rematch_by_key ON rematch (workload_id, device_id, candidate_id, default_id);
CREATE INDEX rematch_by_run ON rematch (run_id);

-- A whole step, tuned against default.
CREATE TABLE race (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    device_id INTEGER NOT NULL REFERENCES device (id),
    result TEXT NOT NULL,
    recorded_at TEXT NOT NULL
);
CREATE INDEX race_by_key ON race (key, device_id);

-- 'noisy' is no verdict; of the rest the latest row of a candidate holds.
CREATE VIEW latest_measurement AS
SELECT m.*
FROM measurement AS m
WHERE m.status <> 'noisy'
    AND NOT EXISTS (
        SELECT 1
        FROM measurement AS later
        WHERE later.workload_id = m.workload_id
            AND later.device_id = m.device_id
            AND later.candidate_id = m.candidate_id
            AND later.status <> 'noisy'
            AND later.id > m.id
    );

CREATE VIEW latest_rematch AS
SELECT r.*
FROM rematch AS r
WHERE r.status <> 'noisy'
    AND NOT EXISTS (
        SELECT 1
        FROM rematch AS later
        WHERE later.workload_id = r.workload_id
            AND later.device_id = r.device_id
            AND later.candidate_id = r.candidate_id
            AND later.default_id = r.default_id
            AND later.status <> 'noisy'
            AND later.id > r.id
    );

-- Everything that may be chosen: candidates that beat the default beyond the margin of their policy, and the default itself.
CREATE VIEW contender AS
SELECT
    r.workload_id,
    r.device_id,
    r.candidate_id,
    r.default_id,
    r.time_us,
    r.default_us,
    r.ratio,
    0 AS is_default,
    r.recorded_at
FROM latest_rematch AS r
JOIN policy AS p ON p.id = r.policy_id
JOIN latest_measurement AS m
    ON m.workload_id = r.workload_id AND m.device_id = r.device_id AND m.candidate_id = r.candidate_id
WHERE r.status = 'ok' AND m.status = 'ok' AND r.candidate_id <> r.default_id AND r.ratio_high <= 1 - p.margin
UNION ALL
SELECT
    m.workload_id,
    m.device_id,
    m.candidate_id,
    m.candidate_id AS default_id,
    m.time_us,
    m.time_us AS default_us,
    1.0 AS ratio,
    1 AS is_default,
    m.recorded_at
FROM latest_measurement AS m
JOIN default_candidate AS d ON d.workload_id = m.workload_id AND d.candidate_id = m.candidate_id
WHERE m.status = 'ok';

-- The first contender of each workload and device, by hand; raftune itself also skips what is not installed.
CREATE VIEW winner AS
SELECT workload, op, device, threads, dialect, version, config, time_us, default_us, ratio, is_default, recorded_at
FROM (
    SELECT
        w.digest AS workload,
        w.op,
        d.model AS device,
        d.threads,
        c.dialect,
        c.version,
        c.config,
        k.time_us,
        k.default_us,
        k.ratio,
        k.is_default,
        k.recorded_at,
        row_number() OVER (
            PARTITION BY k.workload_id, k.device_id
            ORDER BY k.is_default, k.ratio, k.recorded_at DESC, c.digest
        ) AS place
    FROM contender AS k
    JOIN workload AS w ON w.id = k.workload_id
    JOIN device AS d ON d.id = k.device_id
    JOIN candidate AS c ON c.id = k.candidate_id
)
WHERE place = 1;
