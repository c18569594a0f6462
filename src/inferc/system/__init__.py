"""The machine and its operating system: files, memory, processors, signals, environment variables, logs, progress."""
