"""Program to Program: which passes run, in which order, and what holds after each."""
