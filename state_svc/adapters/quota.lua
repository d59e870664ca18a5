-- One exchange of one holder about one tenant's quotas. Touches KEYS[1] alone. The same steps, in
-- Python and with their reasons, are state_svc/domain/quota_book.py; a test holds both to equal answers.
--
-- Fields: t last time, o clock offset, r k sums of the window, f first bucket that counts, g last bucket
-- charged, r<b> k<b> charges of bucket b, c slots, d day, dk its tokens, E last epoch, w contended until.
-- Per holder: h:<name> its epoch. Per epoch: n name, x expiry, s sequence, a answer, c slots, l end of the
-- lease, q its amounts, u:<e>:<bucket>:<day> and v:<e>:<bucket>:<day> open tokens and requests.
local key, A, at = KEYS[1], ARGV, 0
local floor, min, max = math.floor, math.min, math.max
local INF, SHARE, CONTENDED_MS, WAIT_SLACK_MS, SLOT_RETRY_MS = 1e18, 8, 1000, 20, 1000
local DAY_MS, HOLDERS_MAX, KEY_TTL_S = 86400000, 64, 172800
local function take() at = at + 1; return tonumber(A[at]) end
local function hget(field) return tonumber(redis.call('HGET', key, field) or 0) end
local function add(field, n) if n ~= 0 then redis.call('HINCRBY', key, field, n) end end

at = 1
local holder = A[1]
local seq, running, holder_ttl, clock = take(), take(), take(), take()
local window, width = take(), take()
local limits = {take(), take(), take(), take()}
local lease_ms, ext_r, ext_k, ext_c, overuse_k = take(), take(), take(), take(), take()
local overuse_r = 0

local head = redis.call('HMGET', key, 't', 'o', 'r', 'k', 'c', 'd', 'dk', 'f', 'g', 'E', 'w', 'h:' .. holder)
for i = 1, 12 do head[i] = tonumber(head[i] or 0) end
local last, off, r, k, c, day, dk, f, g, E, contended, epoch = unpack(head)
local raw = clock
if raw == 0 then
  local parts = redis.call('TIME')
  raw = parts[1] * 1000 + floor(parts[2] / 1000)
end
if raw + off < last then off = last - raw end
local now = raw + off

if epoch ~= 0 then
  local known = redis.call('HMGET', key, 's:' .. epoch, 'a:' .. epoch)
  if tonumber(known[1]) == seq then
    redis.call('HSET', key, 'x:' .. epoch, now + holder_ttl)
    return known[2]
  end
  if tonumber(known[1]) > seq then return 'STALE' end
end

local today = floor(raw / DAY_MS)
if today > day then day = today; dk = 0 end
local tail = floor((now - window) / width)
if f < tail then
  local stop = min(tail - 1, g)
  if f <= stop then
    local names = {}
    for b = f, stop do names[#names + 1] = 'r' .. b; names[#names + 1] = 'k' .. b end
    local gone = redis.call('HMGET', key, unpack(names))
    for i = 1, #gone, 2 do
      r = r - tonumber(gone[i] or 0)
      k = k - tonumber(gone[i + 1] or 0)
    end
    redis.call('HDEL', key, unpack(names))
  end
  f = tail
end

local function charge(b, requests, tokens)
  r = r + requests; k = k + tokens
  add('r' .. b, requests); add('k' .. b, tokens)
  if b > g then g = b end
end
local function refund(b, d, requests, tokens)
  if b >= f then charge(b, -requests, -tokens) end
  if d == day then dk = dk - tokens end
end
local function names_of_holders()
  local found, all = {}, redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local e = string.match(all[i], '^n:(%d+)$')
    if e then found[#found + 1] = {tonumber(e), all[i + 1]} end
  end
  table.sort(found, function(a, b) return a[1] < b[1] end)
  return found, all
end
local function reap()
  local found, all = names_of_holders()
  local dead, any = {}, false
  for _, one in ipairs(found) do
    if one[1] ~= epoch and hget('x:' .. one[1]) <= now then
      dead[tostring(one[1])] = true; any = true
      c = c - hget('c:' .. one[1])
      for _, letter in ipairs({'n', 'x', 's', 'a', 'c', 'l', 'q'}) do redis.call('HDEL', key, letter .. ':' .. one[1]) end
      redis.call('HDEL', key, 'h:' .. one[2])
    end
  end
  if not any then return #found end
  for i = 1, #all, 2 do
    local letter, e, b, d = string.match(all[i], '^([uv]):(%d+):(%d+):(%d+)$')
    if e and dead[e] then
      local n = tonumber(all[i + 1])
      if letter == 'u' then refund(tonumber(b), tonumber(d), 0, n) else refund(tonumber(b), tonumber(d), n, 0) end
      redis.call('HDEL', key, all[i])
    end
  end
  local left = 0
  for _, one in ipairs(found) do if not dead[tostring(one[1])] then left = left + 1 end end
  return left
end

local registered = false
if epoch == 0 then
  if reap() >= HOLDERS_MAX then return 'FULL' end
  E = max(E + 1, raw)
  epoch = E
  redis.call('HSET', key, 'h:' .. holder, epoch, 'n:' .. epoch, holder, 'c:' .. epoch, running)
  c = c + running
end
local own = hget('c:' .. epoch)

local count = take()
for _ = 1, count do
  local e, b, d, requests, tokens, slots, back_r, back_k = take(), take(), take(), take(), take(), take(), take(), take()
  if e == epoch then
    local fu, fv = 'u:' .. e .. ':' .. b .. ':' .. d, 'v:' .. e .. ':' .. b .. ':' .. d
    local open_k, open_r = hget(fu), hget(fv)
    tokens = min(tokens, open_k); requests = min(requests, open_r)
    if tokens == open_k then redis.call('HDEL', key, fu) else add(fu, -tokens) end
    if requests == open_r then redis.call('HDEL', key, fv) else add(fv, -requests) end
    refund(b, d, min(back_r, requests), min(back_k, tokens))
    slots = min(slots, own)
    own = own - slots; c = c - slots
  else
    overuse_k = overuse_k + max(tokens - back_k, 0)
    overuse_r = overuse_r + max(requests - back_r, 0)
  end
end
local bucket = floor(now / width)
if overuse_k ~= 0 or overuse_r ~= 0 then
  charge(bucket, overuse_r, overuse_k)
  dk = dk + overuse_k
end

local function room(i, used)
  if limits[i] < 0 then return INF end
  return limits[i] - used
end
local function lacks(tokens)
  local short = {}
  if room(1, r) < 1 then short[#short + 1] = {1, 1 - room(1, r)} end
  if room(2, k) < tokens then short[#short + 1] = {2, tokens - room(2, k)} end
  if room(3, c) < 1 then short[#short + 1] = {3, 1 - room(3, c)} end
  if room(4, dk) < tokens then short[#short + 1] = {4, tokens - room(4, dk)} end
  return short
end
local charges
local function window_delay(letter, missing)
  if not charges then
    charges = {}
    local names = {}
    for b = f, g do names[#names + 1] = 'r' .. b; names[#names + 1] = 'k' .. b end
    if #names > 0 then
      local found = redis.call('HMGET', key, unpack(names))
      for i = 1, #found, 2 do charges[#charges + 1] = {r = tonumber(found[i] or 0), k = tonumber(found[i + 1] or 0)} end
    end
  end
  for i, one in ipairs(charges) do
    missing = missing - one[letter]
    if missing <= 0 then return (f + i) * width + window - now end
  end
  return window
end
local leases
local function recallable()
  if leases then return leases end
  leases = {0, 0, 0, 0, till = now}
  for _, one in ipairs((names_of_holders())) do
    local e = one[1]
    if e ~= epoch then
      local till = hget('l:' .. e)
      if till > now then
        local er, ek, ec = string.match(redis.call('HGET', key, 'q:' .. e), '^(%d+) (%d+) (%d+)$')
        leases[1] = leases[1] + er; leases[2] = leases[2] + ek; leases[3] = leases[3] + ec; leases[4] = leases[4] + ek
        leases.till = max(leases.till, till)
      end
    end
  end
  return leases
end

local wants = take()
local verdicts, granted_r, granted_k, short_of_room, reaped = {}, 0, 0, false, false
for i = 1, wants do
  local tokens, final = take(), take()
  local short = lacks(tokens)
  if #short > 0 and not reaped then
    reap(); reaped = true
    short = lacks(tokens)
  end
  if #short == 0 then
    r = r + 1; k = k + tokens; dk = dk + tokens; c = c + 1
    own = own + 1; granted_r = granted_r + 1; granted_k = granted_k + tokens
    verdicts[i] = '1 0 0'
  else
    short_of_room = true
    local never
    for _, one in ipairs(short) do
      local least = (one[1] == 2 or one[1] == 4) and tokens or 1
      if not never and limits[one[1]] < least then never = one[1] end
    end
    if never then
      verdicts[i] = '4 0 ' .. never
    else
      local can_wait, lent = final == 0, recallable()
      for _, one in ipairs(short) do if lent[one[1]] < one[2] then can_wait = false end end
      if can_wait then
        contended = now + CONTENDED_MS
        verdicts[i] = '2 ' .. (lent.till - now + WAIT_SLACK_MS) .. ' ' .. short[1][1]
      else
        local delay, kind = -1, 0
        for _, one in ipairs(short) do
          local wait
          if one[1] == 1 then wait = window_delay('r', one[2])
          elseif one[1] == 2 then wait = window_delay('k', one[2])
          elseif one[1] == 3 then wait = SLOT_RETRY_MS
          else wait = DAY_MS - raw % DAY_MS end
          if wait > delay then delay = wait; kind = one[1] end
        end
        verdicts[i] = '3 ' .. delay .. ' ' .. kind
      end
    end
  end
end

local er, ek, ec = 0, 0, 0
if lease_ms > 0 and ext_r > 0 and not short_of_room and now >= contended then
  er = min(ext_r, floor(room(1, r) / SHARE))
  ek = min(ext_k, floor(room(2, k) / SHARE), floor(room(4, dk) / SHARE))
  ec = min(ext_c, floor(room(3, c) / SHARE))
  if er < 1 or ek < 1 or ec < 1 then er = 0; ek = 0; ec = 0 end
end
local lease_granted = 0
if er > 0 then
  lease_granted = min(lease_ms, DAY_MS - raw % DAY_MS)
  bucket = floor((now + lease_granted) / width)
  r = r + er; k = k + ek; dk = dk + ek; c = c + ec; own = own + ec
  granted_r = granted_r + er; granted_k = granted_k + ek
  local till, lent = hget('l:' .. epoch), {0, 0, 0}
  if till > now then
    local a, b, d = string.match(redis.call('HGET', key, 'q:' .. epoch), '^(%d+) (%d+) (%d+)$')
    lent = {a, b, d}
  end
  redis.call('HSET', key, 'l:' .. epoch, now + lease_granted,
    'q:' .. epoch, (lent[1] + er) .. ' ' .. (lent[2] + ek) .. ' ' .. (lent[3] + ec))
end
if granted_r > 0 then
  add('r' .. bucket, granted_r); add('k' .. bucket, granted_k)
  if bucket > g then g = bucket end
  add('u:' .. epoch .. ':' .. bucket .. ':' .. day, granted_k)
  add('v:' .. epoch .. ':' .. bucket .. ':' .. day, granted_r)
end

local answer = table.concat({epoch, bucket, day, er, ek, ec, lease_granted, now < contended and 1 or 0,
  table.concat(verdicts, ' ')}, ' ')
redis.call('HSET', key, 't', now, 'o', off, 'r', r, 'k', k, 'c', c, 'd', day, 'dk', dk, 'f', f, 'g', g, 'E', E,
  'w', contended, 'x:' .. epoch, now + holder_ttl, 's:' .. epoch, seq, 'a:' .. epoch, answer, 'c:' .. epoch, own)
redis.call('EXPIRE', key, KEY_TTL_S)
return answer
