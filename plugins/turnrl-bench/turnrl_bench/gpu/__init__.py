"""`turnrl bench gpu`: as much as a GPU can tell in nine minutes, worth the most first.

    parts      the parts in their order, and the seconds of each
    driver     a process that measures, watched: what it dies of is one part's error
    worker     that process: part after part
    results    the JSON file, written whenever a part or a case of one is over
    floors     the bytes and operations that cannot be spared, and so the least seconds
    shapes     networks, iterations, and how much of each is measured
    bench      the random model, its policies, trajectories
    device     waiting for a device, its peaks, what it does at best
    machine, loading, decoding, learning, profiling, iteration, generating, training: a part each
    passes     an engine's forward passes, timed from outside
    report     the tables

A part is a function of the bench and its cases. Nothing here knows the engine's insides: passes are
timed by the policy that it calls.
"""
