"""`turnrl bench gpu`: measures a GPU in nine minutes, the most telling parts first.

    parts      the parts in their order, their seconds, and the sizes to measure
    driver     runs each part in its own process: a crash or a hang costs only that part
    worker     the process of a part
    results    the JSON file, written whenever a case ends
    floors     the bytes and operations that the mathematics needs, and so the least seconds
    bench      the random model, its policies, trajectories
    device     waits for a device, and measures its peaks and highest rates
    machine, decoding, learning, iteration: the parts
    report     the tables

A part is a function of the bench and its cases.
"""
