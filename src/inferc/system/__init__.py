"""The operating system and the machine: files, memory, processors, environment variables, log lines."""
