-- Keeps decision records of one tenant. KEYS[1] orders their ids by age; the others are the records.
-- ARGV: how long they are kept (s), how many, prefix of a record's key, then per record: id, value.
-- The keys of the oldest are made from the prefix: they have the tenant's hash tag as well.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 2, #KEYS do
  local at = 4 + (i - 2) * 2
  redis.call('SET', KEYS[i], ARGV[at + 1], 'EX', ARGV[1])
  redis.call('ZADD', KEYS[1], now + i, ARGV[at])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1] * 1000000)
local over = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[2])
if over > 0 then
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, over - 1)) do redis.call('DEL', ARGV[3] .. id) end
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, over - 1)
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return over
