"""The ledger of statements and the checks behind them; `ledger.audit` runs them."""
