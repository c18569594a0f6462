"""The engine: schedule, run, update; on a thread, in a process, as `inferc.LLM`."""
