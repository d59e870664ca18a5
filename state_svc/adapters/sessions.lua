-- One operation on sessions of one tenant; after session_rules.lua. Answers {status, ...}.
local function limits() return {int(), int(), int()} end

if op == 'create' then
  local id, request, asked, ttl, sessions_max, bounds = take(), take(), take(), int(), int(), limits()
  local messages, size = rest()
  local known = call('GET', P .. 'sessions:request:' .. request)
  if known then
    local when, which = string.match(known, '^(%d+) (.+)$')
    local row = now - when < DEDUP_MS and session_row(which)
    if row and reused(call('HGET', session_key(which), 'asked'), asked) then return {'REUSED'} end
    if row then return {'OK', which, row} end
  end
  sessions_drop_expired()
  if call('ZCARD', S) >= sessions_max then return {'SESSIONS_FULL', 'sessions_max'} end
  local problem = session_add(id, messages, size, bounds, SESSION_OVERHEAD)
  if problem then return problem end
  call('HSET', session_key(id), 'version', 1, 'ttl', ttl, 'create', now, 'update', now, 'asked', asked)
  call('ZADD', S, call('HINCRBY', S_META, 'n', 1), id)
  session_touch(id, '')
  call('SET', P .. 'sessions:request:' .. request, string.format('%.0f %s', now, id), 'PX', DEDUP_MS)
  return {'OK', id, session_row(id)}
end

if op == 'list' then
  local size, before = int(), int()
  local found, last = {}, 0
  local top = before > 0 and '(' .. before or '+inf'
  local ids = call('ZREVRANGEBYSCORE', S, top, '-inf', 'WITHSCORES', 'LIMIT', 0, size + DROP_MAX)
  for i = 1, #ids, 2 do
    local row = session_row(ids[i])
    if row and #found == size then return {'OK', last, found} end
    if row then
      last = tonumber(ids[i + 1])
      found[#found + 1] = {ids[i], row}
    end
  end
  -- As many as were asked for: there may be more behind those that have run out.
  return {'OK', #ids == 2 * (size + DROP_MAX) and tonumber(ids[#ids]) or 0, found}
end

local id = take()
local row = session_row(id)
if not row then return {'SESSION_UNKNOWN'} end

if op == 'get' then
  local first, size = int(), int()
  return {'OK', row, size > 0 and page(session_key(id) .. ':messages', first, size) or {}}
end

if op == 'append' then
  local expected, request, asked, bounds = int(), take(), take(), limits()
  local messages, size = rest()
  local answered = session_key(id) .. ':request:' .. request
  local known = call('HMGET', answered, unpack(S_ROW))
  local when, earlier = unpack(call('HMGET', answered, 'when', 'asked'))
  if when and now - when < DEDUP_MS then return reused(earlier, asked) and {'REUSED'} or {'OK', known} end
  if row[7] ~= '' then return {'SESSION_BUSY'} end
  if expected >= 0 and expected ~= tonumber(row[1]) then return {'VERSION'} end
  sessions_drop_expired()
  local problem = session_add(id, messages, size, bounds, 0)
  if problem then return problem end
  session_touch(id, '')
  row = session_row(id)
  local fields = {'when', now, 'asked', asked}
  for i, name in ipairs(S_ROW) do fields[#fields + 1] = name; fields[#fields + 1] = row[i] end
  call('HSET', answered, unpack(fields))
  call('PEXPIRE', answered, DEDUP_MS)
  return {'OK', row}
end

if op == 'delete' then
  if row[7] ~= '' then return {'SESSION_BUSY'} end
  session_drop(id)
  sessions_keep()
  return {'OK'}
end
