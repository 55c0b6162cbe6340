"""The algorithm: an iteration collects trajectories, gives them credit and learns from them.

module          `MTGRPO`, the LightningModule: read this first
lifecycle       set up, loaded, optimised, saved and closed
loader          an iteration as Lightning's data loader
questions       `QuestionData`: which question is asked when
collection      the policy acts on questions, and its attempts are scored
experience      the groups of an iteration with their credit
learning        optimiser steps, and minibatches that fit
checkpoints     the trained weights alone, and resuming
callbacks       the first and the last validation, and plugins' callbacks
also            `AlsoScore`: curves of other questions
asking          questions of your own, answered and scored
checks          settings that do not fit together
trainer_checks  settings of a Trainer that a run refuses
"""
