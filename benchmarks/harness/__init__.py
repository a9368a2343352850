"""Parts that suites share.

options                   options, batch sizes and time-out that suites share, and the error of one that cannot run
paired                    turns, and what their samples say: medians, quartiles, intervals
records                   the groups and files that suites write
machine                   the machine that a record belongs to, its load, and the circumstances of a recording
rows                      the names of rows
level_runs                runs of a level's own train.py: its processes, its flags, and jobs for its ranks
configurations            a level on so many devices, as a row of a table times it
two_nodes                 two network namespaces with a cable between them, which can be throttled
node_ranks                a rank on each of these nodes; those of one machine are `common.processes.ranks`
replica_memory            the memory of DataParallel's replicas
lanes                     steps that are recorded as lanes of spans
"""
