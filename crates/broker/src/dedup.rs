//! Which transaction ids a partition certainly does not hold yet.
