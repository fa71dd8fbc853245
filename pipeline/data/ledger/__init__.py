"""The ledger of groups: batches that were lost by damage, and what follows from the batches around them."""
