"""The model: where it comes from, its log-probabilities, and its export.

settings   what a recipe says of a policy
files      where its model lies: a folder or a hub name, its parts, its digest
loading    what is known before the weights load
model      the network, and everything that it computes
adapter    LoRA
layout     token sequences packed into one forward pass that shares their prefixes
attention  attention computed by the caller that lays out the tokens
varlen     torch's kernel for that
head       from hidden states to log-probabilities, entropies and values
compute    products, adapters, fused kernels and recomputation on a device
trials     the head, the attention and the memory tried once after loading
memory     peak use of a device, and the phase that ran out
device     errors of a device, apart from errors in the code that was tried on it
sharding   one policy over several processes (FSDP2)
sizes      dimensions, and how much memory they mean
scoring    log-probabilities of the tokens of trajectories
export     the trained weights as files for use without turnrl
"""
