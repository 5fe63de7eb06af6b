"""Messages in Chinese: the codes, and the sentences that are put together where a problem is found."""
