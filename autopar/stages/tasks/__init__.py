"""The program of one stage, cut into the tasks that a schedule runs; who owns which value, and what memory tasks need."""
