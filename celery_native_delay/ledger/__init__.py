"""The ledger: what is known of the tasks that wait, and the language to ask for them."""
