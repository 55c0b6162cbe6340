"""`turnrl bench gpu`: what a GPU does in nine minutes, the most telling parts first.

    parts      the parts in their order, their seconds, and the sizes that are measured
    driver     runs each part in a process of its own: a crash or a hang costs that part alone
    worker     that process
    results    the JSON file, written whenever a case ends
    floors     the bytes and operations that the mathematics needs, and so the least seconds
    bench      the random model, its policies, trajectories
    device     waiting for a device, its peaks, its highest rates
    machine, decoding, learning, iteration: the parts
    report     the tables

A part is a function of the bench and its cases.
"""
