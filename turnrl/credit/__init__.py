"""Credit: from the rewards of a group to the advantages of turns and tokens."""
