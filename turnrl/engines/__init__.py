"""Token engines: what turns token ids into more token ids. The contract is `turnrl.Engine`."""
