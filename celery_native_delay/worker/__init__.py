"""A worker's part: its bootstep, and what becomes of the tasks that reach it."""
