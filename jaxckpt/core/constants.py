"""Constants that were judged from few programs: each with its unit, and with what it was judged by.

Another program, or another machine, may want other values. None of them makes a result wrong: they change which plan or
schedule is chosen, and how long that takes. What XLA, JAX or a chip's data sheet fixes stands where it is used.
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------------------ seconds of operations

VECTOR = 1 / 8
"""Fraction of the float32 matmul rate that elementwise arithmetic reaches.

Judged by the H100: 61.8 of 494.7 TFLOP/s (its data sheet says 66.9)."""

MATRIX = 0.3
"""Fraction of their peak rate that matmuls and convolutions reach in training.

Judged by reports: large runs have a model FLOPs utilisation of 40 to 55% (A. Chowdhery et al. 2022, "PaLM",
arXiv:2204.02311, table 3; D. Narayanan et al. 2021, arXiv:2104.04473)."""

WEIGHT = 9.0
"""What a FLOP counts on top of its time when plans are weighed, in units of its time at the peak rate.

Memory traffic is what a model of fusion knows least, so of plans that are near in seconds the one that computes less is
taken. Judged by GPT-2: with this weight its plans are below hand-made ones of their peak in FLOPs and seconds, at 2%
more seconds than the fewest."""

CPU_CORE_RATE = 48e9
"""FLOP/s of a core of the local CPU, for the order of magnitude only.

Judged by half of what a core of about 3 GHz with two 256-bit fused multiply-adds in a cycle does."""

CPU_BANDWIDTH = 40e9
"""Bytes per second of the local CPU's memory, for the order of magnitude only. Judged by two channels of DDR4."""

# ------------------------------------------------------------------------------------------------ what one device holds

WHOLE_ELEMENTS = 2**10
"""The compiler is not asked how a value with at most this many elements is sharded: it is taken for whole on every
device. A larger one is taken to be shared equally where nothing is known of it. Judged by a transformer whose queries
have 65,536 elements (tests/planner/test_steps.py): taken for whole, they cost a plan 10% more time."""

NEARLY_FULL = 0.8
"""A program above this share of a TPU's memory is compiled to the end: its code is in that memory too, and may not fit.
No measurement is on record."""

# ------------------------------------------------------------------------------------------------ how a program is cut

MOST_STAGES = 52
"""Maximum number of stages; of more, neighbours are joined. A limit of planning time, judged by GPT-2 of 12 to 96
blocks (benchmarks/planning.py)."""

UNLIKE = 24
"""A model without repeated blocks is cut at both ends of where the least bytes cross, if it has at most this many such
places: one of them may be the end of what a person takes for a block. Judged by three unlike blocks in a row, whose
least plan needed 15% more than checkpoints around the blocks."""

ROUGH = 200
"""There, bytes that cross count in so many parts of the most that cross anywhere. Judged by a dropout between two
layers, whose end has eight bytes of a random key more crossing it than its beginning.
"""

LOOPS = 25
"""Maximum number of scans that are planned for as loops: those that hold most bytes. What lies between them is a stage
too. A limit of planning time, judged by benchmarks/planning_scale.py."""

HELD = 0.01
"""A scan without a matmul or the like is planned for as a loop if its iterations make more than this share of the bytes
of what a function makes. Judged by elementwise scans of 15 to 256 iterations on an H100, which need up to 14 times the
peak of a checkpoint around runs of 16 of these iterations otherwise.
"""

CHEAP = 48
"""Operations that follow one another without a matmul or the like, of which at least so many may be cut, if their stage
bounds every plan. Judged by chains of 60 and 400 elementwise operations, which XLA's CPU compiler does not fuse. With
16, plans of the U-Net and of ResNet-50, which have runs of 30, compute up to 2% more."""

LONG = 512
"""Maximum number of operations in a stage, before neighbours are joined. A limit of planning time, judged by
benchmarks/planning_scale.py."""

WIDEST = 4
"""Maximum number of stages in one region, but for a model's blocks (`jaxckpt.planner.stages.repeats`).

Judged by the models of benchmarks/; no measurement of other widths is on record."""

PERIODS = 32
"""The blocks of a model are looked for at this many distances, those at which most equal matmuls, convolutions and
loops follow one another. A block of GPT-2 has 6 matmuls, so its own distance is within the first few. No measurement is
on record."""

REPEATED = 0.25
"""Fewest operations that a model's blocks cover, as a fraction of all. Judged by the U-Net, of which a part of three
levels repeats that begins in the middle of a block (16%; cut there, its plans compute up to 1% more), and by ResNet-50
(28%)."""

MORE_REPEATED = 0.1
"""The same of each further series of blocks, before or after the model's, as of an encoder before its decoder. Judged
by an encoder-decoder of four and four blocks, of which the encoder's cover 31%."""

MORE_BLOCKS = 3
"""Fewest blocks of each further series. Judged by a small U-Net with two blocks at each of four levels, whose least
plan takes 10% more where series of two are cut."""

NEARLY = 0.95
"""Of stretches whose copies cover this fraction of the most operations, the shortest is a model's block: two blocks
cover as many as one. Judged by the models of benchmarks/."""

OPERATIONS = 5000
"""Maximum number of operations that are differentiated to find candidates; single stages are always differentiated. A
limit of planning time, judged by benchmarks/planning.py."""

FINER = 0.1
"""Split the stage that needs most bytes if that lowers its need by this fraction.

Judged by the U-Net, whose last upsampling goes from 1.2 to 0.9 GiB; transformers have no such stage."""

# ------------------------------------------------------------------------------------------------ candidates for loops

MOST_LOOP_CANDIDATES = 1600
"""Maximum number of candidates of a loop; those that save the fewest bytes over another go first. A limit of planning
time. Judged by the same LSTM: with `SPLITS` of 96 and 400 candidates, every second one would be left out.
"""

REMEMBERED = 64
"""Maximum number of plans of one problem that are kept on disk: as many budgets. A plan takes about a kilobyte. No
measurement is on record."""

INNER = 1.1
"""A plan of a loop's body is left out if another way of the loop needs at most this many times its bytes and its time:
the two are estimated by two models. Judged by a scan of pair stacks on the H100: without it a plan at 60% of the peak
took 0.7% of the step more.
"""

SAME_TIME = 5e-4
"""Ways to run a loop are as fast as one another if they differ by less than this share of the loop's forward and
backward pass: the one of fewer bytes is taken. Judged by an LSTM of 512 iterations on the CPU: it takes 1.45 times
as long with `Slots(8, run_length=64)` as with `Slots(52, run_length=10)`, which needs 0.4 of the bytes and is 0.02%
slower by the rates."""

KEPT_FOR_LESS = 0.25
"""Of two ways to run a loop that take the same time, the one of fewer bytes may keep more until the loop's backward
pass, by this share of what it needs less in all. Judged by the same LSTM: 1 MiB more kept for 14 MiB less."""

SHORTEST = 16
"""Fewest iterations of a scan that slots are offered for: of fewer, nested segments keep hardly more. No measurement is
on record."""

TURNS_A_SECOND = 1e11
"""FLOP/s by which `SlotBudget.turn_flops` is seconds. Judged by the machine that it was measured on."""

SLOT_LIMITS, SLOT_FACTOR = 24, 1.35
"""Slots are offered for this many limits of bytes, each smaller than the one before by this factor. No measurement is
on record.
"""

PART = 2
"""The fewest iterations of each part of a loop that is divided in two. XLA writes one iteration out, and keeps other
values of it than a loop does. Judged by a scanned GPT-2 on an H100: with one iteration apart the compiled step needs
455 to 528 MiB more than is estimated, else at most 96."""

SPLITS = 96
"""Maximum number of places where a scan is split in two runs that keep different values. Judged by an LSTM of 1,024
steps on the H100: with 24 places, plans for 25 and 30% of the peak left 3 to 4% of the budget, and computed 0.8% more
FLOPs than plans that fill it; with 96 they are within 0.05%, and planning takes no longer.
"""

LENGTHS = 40
"""A scan of up to twice as many iterations is offered segments of every length; of more, this many lengths, evenly
spaced by their logarithm. No measurement is on record."""

DEAR_LOOP = 0.15
"""Iterations may be left without a checkpoint where names cannot spare this fraction of their forward time: that of a
loop inside, for example. Judged by a scan inside a scan."""

# ------------------------------------------------------------------------------------------------ the search for a plan

INNERMOST_SHARE = 0.5
"""A `jax.shard_map`, or a call that says how arrays lie, is planned in place of a function if it computes more than
this share of its bytes. What is around it keeps what it keeps. Where that leaves no plan that fits, the other one is
planned. No measurement is on record."""

LEVELS = 4
"""How many ways to keep values inside of branches and short loops are looked at, for each stretch that has any. Each
takes a trace of the stretch. Judged by blocks with a cond."""

PLANS = 12
"""How many plans of a loop's body are candidates for the loop, where the body has loops or several blocks in it. Judged
by a scan of scans."""

COMPILES = 4
"""Maximum number of compilations of the whole training step. Two mostly do. Judged by GPT-2 on an H100, whose first
prediction is off by 1 to 5% and the second by under 0.5%."""

QUICK, QUICK_COMPILES = 500, 6
"""A program of at most `QUICK` operations, on one device, mostly compiles in seconds. Of its step there are up to
`QUICK_COMPILES` compilations. Judged by a transformer of four blocks in bfloat16 on the CPU: after four compilations
its plan computes 34% more, at 1% more memory 5%.

For these programs alone, what goes out of a stretch and is needed by its own backward pass counts in the bytes of that.
With it a plan of three unlike blocks computes 26% more in place of 40%; one of ResNet-50 on a TPU at 30% of its peak
computes 22.4% in place of 18.4%, since there the traces correct the chain by as much again."""

BETWEEN = (0.5, 0.75, 0.9)
"""Where the next plan is looked for, between one that fits and one that does not: shares of the way in modelled bytes.
Judged by the same transformer, and by ResNet-50, whose compiled peaks rise in steps."""

OTHERS = 100
"""Other solutions are looked for at limits that differ by the budget over this number. Judged by a mixture of experts
on an H100 at 40% of its peak: with a limit of 1% of the budget more than the leanest solution that takes less, the
chain has one with other regions that takes 0.5% of the step less."""

MORE = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35)
"""How much more than the best plan others need by the chain that are tried, in these programs, if their estimate says
that they fit. Judged by a chain of eight matmuls, whose plan for 1.586 MB needed 1.576 and another one, cheaper by two
thirds, 1.574."""

FILLED = 0.005
"""Stop once the compiled peak is within this fraction below the budget. Judged by ResNet-50 on a TPU at 40% of its
peak: a plan that needs 0.5% more bytes than the one at which a fraction of 0.02 stops computes 0.9% less of the step's
FLOPs in 0.8% more of its seconds, and is the cheaper one as plans weigh the two."""

CLOSE = 0.02
"""Two peaks are close to one another if they differ by at most this fraction. Judged by the models of benchmarks/."""

WORTH = 0.0005
"""Compile one more plan after one within `FILLED` if by the chain it takes less time by this fraction of the step.
Judged by ResNet-50 on a TPU at 70% and 90% of its peak: with 0.003 its plans compute 0.27 and 0.09% more of the step's
FLOPs."""

SLIGHT = 0.02
"""What is before and after the blocks is left to JAX, as people leave it, if at most this fraction of its forward run
is computed again: an embedding's rows are looked up in no time. Judged by language models of few blocks."""

TINY = 0.001
"""Checkpoints as people write them are compiled if the traced step says that they take less by this fraction. No
measurement is on record."""

TINIEST = 1e-4
"""As `TINY`, of a small program, whose plans compile in no time. Judged by four layers with their optimizer on an H100:
with 0.001 a plan computes 0.26% more of the step's FLOPs than checkpoints around three of them, which fit as well."""

RIVALS = 2
"""So many checkpoints as people write them that are estimated to fit, and take less than the best plan in FLOPs or in
seconds, are compiled to see whether they do. No measurement is on record."""

HEAVIER, LIGHTER = (4.0, 16.0), (0.25, 0.0)
"""How many times as much FLOPs weigh where a plan is looked for that computes no more than its rivals, or takes no
longer. Judged by six blocks of attention on an H100 at the peak of the preset `dots_no_batch`: with 4 the plan computes
0.29% of the step less than with 1, with 1,000 it is the same."""

AROUND = (0.9, 0.94, 0.97, 1.0, 1.03, 1.06, 1.1)
"""Where such a plan is looked for: shares of the bytes that the best plan needs by the chain. Judged by a loss of one
example under `jax.vmap` at the peak of the preset `dots`, where other budgets were asked for before: what these taught
the chain hides the plan that a first search finds."""

EVEN = 0.01
"""By how much of the step, as plans are weighed, such a plan may be dearer. Judged by the same blocks of attention,
whose plan is dearer by 0.16%; with 0.04 it could be the preset, which takes 7 points of time more."""

UNEQUAL = 1e-4
"""Of a large program's plans whose bytes are within this fraction of the fewest, by the chain and by a trace, the
cheapest is taken as the leanest: neither knows bytes better. Judged by GPT-2 on an H100: a region around its head saves
0.004% by the chain, and the compiled step then needs 1.3% more. By the chain alone a mixture of experts would have
another leanest plan, which compiles to 0.7% more.
"""

AIMS, QUICK_AIMS = 4, 8
"""How many solutions are traced, to predict their peaks, for one that is compiled. Judged by the models of benchmarks/:
a trace takes a tenth of the time of a compilation, and what it predicts is off by nearly the same bytes in all plans.
For the programs of `QUICK`, as many as take the time of one compilation."""

UNITS = 1000
"""What the chain is corrected by, from a trace, is rounded up to this fraction of the budget: stretches that are equal
stay so, and are solved once. No measurement is on record."""

STEEP = 0.03
"""Look between a plan that fits and one that does not if the second one's recomputation takes less by this fraction of
the forward pass. Judged by ResNet-50 and the U-Net, whose compiled peaks do not rise with the modelled bytes."""

FLOORS = 3
"""Where no plan fits, this many checkpoints as people place them are compiled beside the plan that needs least by the
model. No measurement is on record."""

KNOWN, SPREAD = 4, 0.1
"""Once so many checkpoints as people write them are compiled, another one whose estimate is above the compiled peak by
this fraction more than any of theirs is taken for one that does not fit. Judged by 13 small models on the H100 and the
CPU with budgets that have no plan: 610 compilations for 1,037, and the least that is found of each stays. With 0.05
that of a convolutional network is 1.5% more.
"""

NECKS = 3
"""Ways in which blocks of a program of `QUICK` are cut at most, by how much crosses between them. Judged by random
programs of two to five unlike blocks, on a CPU: where blocks begin with small results, such as those of a router, the
stages at which less crosses than on either side are no ends of blocks. Each way is eight traces of the step.
"""

FEW_STAGES = 8
"""A program of `QUICK` with at most two equal blocks, of at most so many stages, has no plan only after a checkpoint
around each run of stages was compiled, all else left to JAX. Judged by random programs of three to five unlike blocks,
on a CPU and an H100: in one of five, checkpoints around each block needed less than the leanest plan, and a single
checkpoint around some stages less than both. What compilers fuse there no estimate knows.
"""

ABOVE = (1.02, 1.05)
"""Where no plan fits, the cheapest plans that need this many times as much as the leanest one by the model are compiled
too. The model errs by a few percent of the peak, so one of them may be the leanest. Judged by a language model whose
least plan compiled to 863 MiB and the next one to 840."""

LEANER = (1.0, 0.95)
"""Before a program of `QUICK` is said to have no plan, plans are looked for within this many times the bytes of the
leanest one: a search for less aims at others. Judged by a chain of ten small blocks, whose plans for 178 kB needed 179
and the one for 166 kB 166."""

OVERSTATED, OVERSTATED_BY_CUDA = 1.35, 1.1
"""By how much the estimate of the peak of checkpoints as people write them may be above the compiled peak.

Judged by twelve models: on the CPU at most 1.334, where XLA fuses what is left to it, on the H100 1.098. Most estimates
are below."""

OVERSTATED_LOOP = 2.0
"""As `OVERSTATED`, where bodies of loops are checkpointed and all else is left to JAX: what one iteration needs is all
that counts. Judged by a ray marcher with a network of six layers with relu, whose estimate is
1.58 times the compiled peak on the H100."""

SLOTS_SLOWER = 0.2
"""By which share of a loop's time, forward and backward, a CPU takes longer for `Slots` than a trace says. Judged by an
LSTM of 512 steps on two cores: by the rates `Slots` took 7% of the step less than a checkpoint around each iteration,
and measured 13% more."""

OVERTIMED = 1.2
"""Checkpoints as people write them are traced if by the chain they take up to so many times the time of the best plan.
Judged by GPT-2, of which the chain says up to 1.12 times what the traced step adds."""

OUTLYING = 1.1
"""By how much the bytes of a step by the chain, offset by those of the nearest compiled plan, may be above what a trace
of the step estimates: a step is not traced to see whether it fits where the chain says that it needs more than that.
Judged by a chain of matmuls, a residual network and one of flax at three budgets: at most 1.04."""

MARGIN = 0.005
"""After a plan that did not fit, aim the next one this fraction of the budget lower, and the one after it six times as
much. Judged by the models of benchmarks/."""

NESTED = 5000
"""Maximum number of operations inside nested regions for which the training step of the plan that needs least is
traced. A limit of planning time, judged by benchmarks/planning_scale.py: JAX traces what a region holds once for each
region around it."""

STALE = 0.9
"""A stored plan for what was free on the device serves again if its budget was at least this fraction of what is free
now. No measurement is on record."""

MUCH = 0.25
"""Views that show at least this fraction of an input lie in the region that reads them. Judged by blocks that read four
matrices of one array each, and by eight blocks that read their parts of stacked weights."""

TIGHTER = 1 / 8
"""A plan whose step ran out of memory is followed by one whose peak is less by this fraction at least. The device
cannot always say how much was missing: free bytes that are scattered serve nobody. No measurement is on record."""

SHARED_PARTS = 2000
"""Regions that the planner's traces of a program share, at most. A plan has up to a few hundred. It bounds memory. No
measurement is on record."""

ROOM = 1.5
"""The step as it is is compiled first where its estimate is at most this many times the budget. The estimate of a step
without checkpoints is too high by up to a third where XLA fuses. No measurement is on record."""

FAR_BELOW = 2.0
"""A plan is far below the budget if it needs less by more than this many times `CLOSE`. No measurement is on record."""

AIMED = 0.25
"""A traced solution is near enough to the budget if it needs less by at most this share of `CLOSE`. No measurement is
on record."""

MISSED, HIT = 6, 0.5
"""`MARGIN` is multiplied by the first for each plan after the first that did not fit, as long as none fits; otherwise
by the second. No measurement is on record."""

CUTS = 24
"""Candidates of a stretch, at most, of those that differ in what is kept: the convex hull of bytes and seconds. A limit
of planning time. No measurement is on record."""

# ------------------------------------------------------------------------------------------------------ the host's link

LINK_PRICES = (0.01, 0.05, 0.2, 0.7)
"""Seconds of work that a second of the host's link may cost where a stretch is looked at for what to move to the host:
little where the link has room, more where it is nearly full. At 1 a transfer that nothing hides is paid. No
measurement is on record."""

PLAN_LINK_PRICES = (0.001, 0.01, 0.03, 0.1, 0.2, 0.35, 0.6, 1.0, 2.0, 5.0)
"""The same, of a whole plan, rising: the least at which the link is not more than full is taken for the first stages,
and the one before it for the others. No measurement is on record."""

LINK_FULL = 0.97
"""How much of the step's seconds the planner's model lets the host's link be at work, so that the traced step, whose
seconds differ a little, finds it at most full. No measurement is on record."""

LINK_SHARES = (1.0, 0.6, 0.3)
"""Shares of the link that one stage may take, where plans are also looked for with such a bound: loops would take more
than all of it. Judged by a scan of six layers on an H100."""

# ------------------------------------------------------------------------------------------------ the liveness model

OPERANDS = 96
"""Maximum number of arrays that one fused loop reads: what reads more is stored half way. XLA's
`MaxOperandsAndOutputsPerFusion` for GPUs, judged to be the same on every platform."""

SPLIT_TILE, SPLIT_CONTRACTED = 128, 64
"""Where a matmul's contraction is split (`Fusing.split_cores`): the rows and columns of a tile of its result, and the
fewest elements that a part contracts over. Judged by the H100."""

# ------------------------------------------------------------------------------------------------ schedules of loops

LARGE = 2**19
"""Bytes of the cotangents of constants from which on adding to them in every iteration is dear: they no longer lie in a
core's cache with all else that an iteration touches.

Judged by a CPU with 2 MiB of cache a core; below it a matmul for every iteration is as fast as one for several."""

# What goes on beside an iteration's own FLOPs, in FLOPs that take as long. They are weighed against one another and
# against iterations, for choosing alone. Judged by an LSTM and an MLP on a CPU of 100 GFLOP/s.
TURN = 2_000_000
"""FLOPs of a turn of the backward loop."""
ITERATION = 300_000
"""FLOPs of one iteration of the loops within."""
KEPT = 64
"""FLOPs for a byte that a run keeps: written, read, and what is elementwise made of it computed once more."""
ADDED = 16
"""FLOPs for a byte of a large cotangent that an iteration's product is added to."""

UNDIVIDED = 640
"""XLA for a GPU contracts at least one row at once for so many elements of a matmul's result; longer contractions it
divides, so that all cores have work. Judged by matmuls compiled for an H100: 256 x 512 are divided from 224 rows on,
512 x 512 from 416, 512 x 1,024 from 896."""
DIVIDED = 4
"""Parts that it divides such a contraction into, each as large as the result. Judged by the same: 2 at first, and 16
for 4,096 rows."""

TRANSFER = 0.25
"""What moving a carry between device and host costs, one way, in iterations of a scan, where nothing else is said. Two
transfers cost less than an iteration, so that a host slot is used wherever it spares one. No measurement is on record.
"""
LONGEST_RUN = 64
"""Maximum number of iterations in one run of a binomial schedule. No measurement is on record."""

LOG_BASE = 4
"""Segments of a level of the schedule "log". It follows from the counts: 2 and 4 keep equally many carries, and 4 runs
iterations half as often."""

# ---------------------------------------------------------------------------------------------------------------- tiles

MOST_TILES = 64
"""Tiles that the planner divides a stretch into, at most. More of them are small matmuls and many loop iterations. No
measurement is on record."""

STANDS_OUT = 2.0
"""The stretch that needs most is tiled alone where it needs at least so many times as much as the next one. The head of
a GPT with 128,256 words needs ten times as much as an attention. Judged by that model alone."""

FAR = 1.1
"""Where the leanest plan is estimated to need this many times a budget, plans with tiles are looked for at once. The
model errs by a few percent of the peak. No measurement is on record."""

KEPT_SHARE = 0.98
"""Share of a budget that a plan which keeps everything may need by the planner's own count, when it says how many tiles
a stretch gets. The model errs by a few percent of the peak. No measurement is on record."""

LEAN_SHARE = 0.97
"""The same for the leanest plan. No measurement is on record."""

LEANER_SHARE, LEANER_TIMES = 0.85, 2.0
"""The same for the leanest plan of a second set of tiles, and how many times as many tiles it has as that asks for. No
measurement is on record."""

ALIKE = 1.1
"""Axes along which a stretch needs at most so many times what it needs along the best one count as about as good: the
one with the fewest FLOPs is taken. No measurement is on record."""

LITTLE = 0.1
"""A stretch is tiled by itself if at its ends at most this share of what it needs passes. No measurement is on record.
"""

TILE_REACH = 8
"""Stages by which a stretch that is tiled may reach beyond those that need too much. No measurement is on record."""

DIVISIONS = 64
"""Divided programs that a tiled function keeps, one for each shape of its arguments: those of the last calls. No
measurement is on record."""

TILED_AXES = 4
"""Axes along which the planner divides a stretch, of those with which it needs less: each takes a trace of it. No
measurement is on record."""

TRIED_AXES = 12
"""Axes along which the planner tries to divide a stretch, at most. Judged by a head of 4 sequences, whose arguments are
those of the loss: it needs less along two of seven axes, and those of labels and weights come first."""

TILE_TRIES = 6
"""Sets of tiles that are planned for one budget, at most: after one that fits, those with fewer tiles. No measurement
is on record."""

QUICK_TILE_TRIES = 16
"""Sets of tiles that are planned besides, at most, where no plan without tiles fits a program of `QUICK` operations:
the stretches that need most along each axis, in as many tiles as there can be and in the fewest that fit; `TILE_TRIES`
where a plan with tiles fits already. Judged by an attention, which has ten such ways."""

OVERSTATED_TILES = 2.0
"""By how much the estimate of a step with tiles may be above its compiled peak. Judged by an attention on the CPU,
whose step in 8 tiles is estimated to need 1.55 times what it is compiled to."""

NEAR = 1.25
"""Where the most tiles need up to this many times a budget, half and a quarter as many are tried: other stretches need
most then, and their plans differ. Judged by two attentions and a head: in 64 tiles of the head 1.97 MB, in 32 1.81."""

MUCH_LESS = 0.9
"""A stretch is tiled along an axis if it then needs less than this share of what it needs. No measurement is on record.
"""

TILE_ROUNDS = 4
"""Times that tiles are looked for in a function that has some. No measurement is on record."""

MOST_PARTS = 2048
"""Parts of a tiled axis, at most: over so many devices an axis may be sharded without being gathered. No measurement is
on record."""

RUN = {1: 128, 2: 8}
"""Dimensions from the tiled one on -> consecutive rows of a part that a tile has at least. It follows from how a TPU
keeps the last two dimensions of an array: in blocks of 8 by 128."""

# ------------------------------------------------------------------------------------------------------ results on disk

CACHE_BYTES = 2**30
"""Bytes of the folder of compilers' results.

Judged by steps of GPT-2 and of the U-Net: 0.1 to 1 MiB each, so a thousand plans and more."""

# -------------------------------------------------------------------------------------------------------------- targets

MOST_DEVICES = 2**16
"""Devices of a target, at most: JAX makes an object of each, and a hundred million take more than three minutes. Judged
by the largest TPU slices, of 9,216 chips."""
