#!/bin/bash
# A PBS job (PBS Pro, OpenPBS) that trains on a prepared dataset, mounted on all of its nodes:  qsub pbs.sh
# Change the #PBS lines and the five values below; the rest can stay. For Torque: #PBS -l nodes=4:ppn=32.
#PBS -N train
#PBS -l select=4:ncpus=32:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=12:00:00
#PBS -j oe
set -euo pipefail
cd -- "$PBS_O_WORKDIR"

fanstore=$HOME/fanstore/.venv/bin     # made by scripts/setup, on a file system that all nodes see
prepared=/shared/imagenet.fan         # made by fanstore-prep
mount=/tmp/imagenet-${PBS_JOBID%%.*}  # appears on every node for as long as the job runs
ssd=${TMPDIR:-/tmp}                   # each node's own disk; with room for the dataset divided by the number of nodes
train=$PWD/train.sh                   # your program: runs once on each node, when the dataset is mounted on all. Say:
#   torchrun --nnodes "$FANSTORE_SIZE" --node-rank "$FANSTORE_RANK" --nproc-per-node 4 \
#            --master-addr "$MASTER_ADDR" --master-port 29500 train.py --data "$FANSTORE_MOUNT"

MASTER_ADDR=$(hostname)
export MASTER_ADDR

# --with-ft ulfm: the others go on if a node dies; what it had is read from second copies (--replicas 2) or from the
# shared file system. --map-by: one daemon per node. --bind-to none: otherwise your program gets a single core.
# The mpirun must be the one beside fanstore-mount; it reaches the nodes with ssh. The exit code is your program's.
# --success: the proof that all nodes have ended well; with --with-ft, mpirun ends with 0 also if all daemons were killed
# (out of memory, say).
proof=$PWD/.success-${mount##*/}
rm -f "$proof"
"$fanstore/mpirun" --hostfile "$PBS_NODEFILE" --with-ft ulfm --map-by ppr:1:node --bind-to none -x MASTER_ADDR \
    "$fanstore/fanstore-mount" "$prepared" "$mount" --local "$ssd" --replicas 2 \
    --success "$proof" -- "$train"
rm "$proof" || { echo "the job was killed: not every node has ended well" >&2; exit 1; }

# Instead of the last command, if your program uses MPI itself: mount first, on all nodes; run; unmount on this node,
# which ends it on all.
#   "$fanstore/fanstore-mount" "$prepared" "$mount" --local "$ssd" --replicas 2 --background \
#       --launch "$fanstore/mpirun --hostfile $PBS_NODEFILE --with-ft ulfm --map-by ppr:1:node --bind-to none"
#   trap '"$fanstore/fanstore-umount" "$mount"' EXIT
#   mpiexec ./train.sh
