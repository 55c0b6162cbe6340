"""A cold start: a policy learns the form of its turns from demonstrations before RL begins.

warmup       `warm_up`: demonstrations, then supervised learning
settings     its settings
forced_play  a demonstrator's texts played as a policy's turns
random_play  a demonstrator that knows nothing but the form
json_values  values that a JSON Schema allows
supervised   cross-entropy of tokens that somebody else chose
"""
