"""An account as a start of the trainer opens it, for tests that have no trainer."""

from torchtitan_dp.ledger import Account, ExecutedSteps, Ledger


def account(ledger: Ledger, executed: ExecutedSteps, total_steps: int) -> Account:
    """Enter what the folder's logs know of lost steps into the ledger, and open its account."""
    executed.enter_lost(ledger)
    return Account(ledger, total_steps)
