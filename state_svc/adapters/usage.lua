-- Adds usage to hours of one tenant, once per batch.
-- KEYS[1] marks the batch; the others are the hours. ARGV: how long a mark and an hour are kept (s), then per
-- amount: number of its hour among KEYS, field, amount.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], 1, 'EX', ARGV[1])
for i = 3, #ARGV, 3 do redis.call('HINCRBYFLOAT', KEYS[tonumber(ARGV[i]) + 1], ARGV[i + 1], ARGV[i + 2]) end
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[2]) end
return 1
