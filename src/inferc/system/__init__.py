"""The machine and its operating system: files, memory, processors, environment variables, and log lines."""
