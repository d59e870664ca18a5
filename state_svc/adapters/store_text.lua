-- Keeps the whole live text of a run. KEYS[1]: its key. ARGV: the text as a message, seconds to keep it.
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return {'OK'}
