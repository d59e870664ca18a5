-- Live text of one run's model call. KEYS[1]: hash (version, token, sequence, step, size, kept); KEYS[2]: the text.
-- Both owned here, and gone ARGV[6] s after the last word. ARGV: token, sequence, step, whether it replaces, text, time
-- to live, most bytes kept, channel. A message there: "<version> <sequence> <step> <offset> <text>".
local call = redis.call
local token, sequence, step, text = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[5]
local known = call('HMGET', KEYS[1], 'version', 'token', 'step', 'size', 'kept')
local last = tonumber(known[2] or 0)
if token < last then return 0 end
local version, size, kept = known[1], tonumber(known[4] or 0), tonumber(known[5] or 0)
if not version or token > last or step ~= known[3] or ARGV[4] == '1' then
  local time = call('TIME')
  version = string.format('%.0f', math.max(time[1] * 1000000 + time[2], tonumber(version or 0) + 1))
  size, kept = 0, 0
  call('DEL', KEYS[2])
end
if kept == size and size + #text <= tonumber(ARGV[7]) then
  call('APPEND', KEYS[2], text)
  kept = kept + #text
end
call('HSET', KEYS[1], 'version', version, 'token', token, 'sequence', sequence, 'step', step, 'size', size + #text, 'kept', kept)
call('EXPIRE', KEYS[1], ARGV[6])
call('EXPIRE', KEYS[2], ARGV[6])
call('PUBLISH', ARGV[8], version .. ' ' .. sequence .. ' ' .. step .. ' ' .. string.format('%.0f', size) .. ' ' .. text)
return 1
