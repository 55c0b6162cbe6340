"""The trained policy, for use without turnrl: its weights, its tokenizer and a model card.

card      the card, and the name of the model that the policy was trained from
ending    the export at the end of a run
"""
