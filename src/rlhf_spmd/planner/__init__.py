"""Where roles run (F5): from a placement setting to the pool of every role. Pure; knows no workers."""
