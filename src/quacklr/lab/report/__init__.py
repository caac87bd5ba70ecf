"""From a ledger to what people look at: figures, a table of claims, one page."""
