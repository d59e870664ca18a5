"""The words in which a holder and the state service speak of quotas."""
