"""What :class:`TuningLog` asks of the file; the rules themselves are views of the schema."""

OUTCOMES = """
SELECT m.*, c.dialect, c.version, c.config, c.digest
FROM measurement AS m
JOIN candidate AS c ON c.id = m.candidate_id
WHERE m.workload_id = (SELECT id FROM workload WHERE digest = :workload)
    AND m.device_id = (SELECT id FROM device WHERE digest = :device)
    AND m.policy_id = (SELECT id FROM policy WHERE digest = :policy)
    AND m.status <> 'noisy'
ORDER BY m.id
"""

REMATCHES = """
SELECT r.*, c.dialect, c.version, c.config, c.digest
FROM rematch AS r
JOIN candidate AS c ON c.id = r.candidate_id
JOIN candidate AS d ON d.id = r.default_id
WHERE r.workload_id = (SELECT id FROM workload WHERE digest = :workload)
    AND r.device_id = (SELECT id FROM device WHERE digest = :device)
    AND r.policy_id = (SELECT id FROM policy WHERE digest = :policy)
    AND (:default IS NULL OR d.digest = :default)
    AND r.status <> 'noisy'
ORDER BY r.id
"""

# The rule itself is the view "contender" of the schema; this orders what it admits.
CONTENDERS = """
SELECT k.*, c.dialect, c.version, c.config, c.digest, d.dialect AS default_dialect, d.version AS default_version,
    d.config AS default_config, d.digest AS default_digest
FROM contender AS k
JOIN candidate AS c ON c.id = k.candidate_id
JOIN candidate AS d ON d.id = k.default_id
WHERE k.workload_id = :workload_id AND k.device_id = :device_id
ORDER BY k.is_default, k.ratio, k.recorded_at DESC, c.digest
"""

SPENT = """
WITH mine AS (SELECT id FROM run WHERE key = :key)
SELECT
    (SELECT total(cost_s) FROM measurement WHERE run_id IN mine) + (SELECT total(cost_s) FROM rematch WHERE run_id IN mine)
        AS seconds,
    (SELECT count(*) FROM measurement WHERE run_id IN mine) AS trials
"""

TRAINING = """
SELECT m.*, c.dialect, c.version, c.config, c.digest, w.id AS workload_id, w.spec AS workload_spec, w.digest AS workload_digest,
    v.spec AS device_spec, v.digest AS device_digest, d.candidate_id IS NOT NULL AS is_default
FROM latest_measurement AS m
JOIN candidate AS c ON c.id = m.candidate_id
JOIN workload AS w ON w.id = m.workload_id
JOIN device AS v ON v.id = m.device_id
LEFT JOIN default_candidate AS d ON d.workload_id = m.workload_id AND d.candidate_id = m.candidate_id
WHERE (:device IS NULL OR v.digest = :device) AND (:op IS NULL OR w.op = :op)
ORDER BY m.workload_id, m.id
"""

PAIRS = """
SELECT DISTINCT k.workload_id, k.device_id, w.spec AS workload_spec, w.digest AS workload_digest,
    v.spec AS device_spec, v.digest AS device_digest
FROM contender AS k
JOIN workload AS w ON w.id = k.workload_id
JOIN device AS v ON v.id = k.device_id
ORDER BY k.device_id, w.op, w.digest
"""

WORKLOAD_AND_DEVICE = """
SELECT w.id AS workload_id, w.spec, d.id AS device_id
FROM workload AS w, device AS d
WHERE w.digest = :workload AND d.digest = :device
"""

LATEST_RACE = """
SELECT id, result
FROM race
WHERE key = :key AND device_id = (SELECT id FROM device WHERE digest = :device)
ORDER BY id DESC
LIMIT 1
"""

WEIGHTS = """
SELECT w.digest, t.weight
FROM task AS t
JOIN workload AS w ON w.id = t.workload_id
WHERE t.run_id = (SELECT max(run_id) FROM task WHERE workload_id = t.workload_id) AND typeof(t.weight) = 'real'
"""
