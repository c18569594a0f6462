"""The engine, which schedules, runs and updates steps: on a thread, in a process, or as `inferc.LLM`."""
