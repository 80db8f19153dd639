/* module_order.c: the functions of fanstore._native that replay shuffles and search for seeds. Translates, nothing else. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "python/module.h"
#include "order/seedsearch.h"
#include "order/swaps.h"

/* Two arrays as buffers: what was drawn (uint32), and the order (int64). */
struct arrays {
    Py_buffer draws, order;
};

static void release(struct arrays *arrays) {
    PyBuffer_Release(&arrays->draws);
    PyBuffer_Release(&arrays->order);
}

static size_t draws_count(const struct arrays *arrays) { return (size_t)arrays->draws.len / sizeof(uint32_t); }
static size_t order_count(const struct arrays *arrays) { return (size_t)arrays->order.len / sizeof(int64_t); }

/* An order has at most UINT32_MAX items: a draw of 32 bits could not choose among more. */
static bool check(struct arrays *arrays) {
    if (order_count(arrays) <= UINT32_MAX)
        return true;
    release(arrays);
    PyErr_SetString(PyExc_ValueError, "an order has at most 2^32 - 1 items");
    return false;
}

static PyObject *swap_forward(PyObject *module, PyObject *args) {
    (void)module;
    struct arrays arrays;
    if (!PyArg_ParseTuple(args, "y*w*", &arrays.draws, &arrays.order) || !check(&arrays))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fsx_swap_forward(arrays.draws.buf, draws_count(&arrays), arrays.order.buf, order_count(&arrays));
    Py_END_ALLOW_THREADS
    release(&arrays);
    Py_RETURN_NONE;
}

static PyObject *swap_backward(PyObject *module, PyObject *args) {
    (void)module;
    struct arrays arrays;
    if (!PyArg_ParseTuple(args, "y*w*", &arrays.draws, &arrays.order) || !check(&arrays))
        return NULL;
    size_t used;
    Py_BEGIN_ALLOW_THREADS
    used = fsx_swap_backward(arrays.draws.buf, draws_count(&arrays), arrays.order.buf, order_count(&arrays));
    Py_END_ALLOW_THREADS
    release(&arrays);
    return PyLong_FromSsize_t(used == SIZE_MAX ? -1 : (Py_ssize_t)used);
}

static PyObject *swap_buffer(PyObject *module, PyObject *args) {
    (void)module;
    struct arrays arrays;
    Py_ssize_t buffer;
    if (!PyArg_ParseTuple(args, "y*w*n", &arrays.draws, &arrays.order, &buffer) || !check(&arrays))
        return NULL;
    const size_t count = order_count(&arrays);
    const size_t held = buffer > 0 && (size_t)buffer < count ? (size_t)buffer : count;
    int64_t *ring = NULL;
    if (buffer < 1 || draws_count(&arrays) < count)
        PyErr_SetString(PyExc_ValueError, "a buffer holds at least one item, and each item needs a draw");
    else if ((ring = PyMem_Malloc((held + 1) * sizeof *ring)) == NULL)
        PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        fsx_swap_buffer(arrays.draws.buf, arrays.order.buf, count, ring, held);
        Py_END_ALLOW_THREADS
    }
    release(&arrays);
    if (ring == NULL)
        return NULL;
    PyMem_Free(ring);
    Py_RETURN_NONE;
}

static PyObject *search_seed(PyObject *module, PyObject *args) {
    (void)module;
    struct fsx_search search;
    Py_buffer sightings;
    Py_ssize_t depth;
    unsigned long long begin, end;
    if (!PyArg_ParseTuple(args, "IIy*nKK", &search.count, &search.skipped, &sightings, &depth, &begin, &end))
        return NULL;
    const size_t given = (size_t)sightings.len / sizeof(struct fsx_sighting);
    search.sightings = sightings.buf;
    search.depth = depth > 0 ? (size_t)depth : 0;
    search.hypotheses = search.depth > 0 ? given / search.depth : 0;
    const bool valid = begin <= end && end <= (unsigned long long)UINT32_MAX + 1 && fsx_search_valid(&search);
    uint64_t seed = end;
    size_t hypothesis = 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        seed = fsx_search_seed(&search, begin, end, &hypothesis);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&sightings);
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "these sightings cannot be searched for");
        return NULL;
    }
    if (seed == end)
        Py_RETURN_NONE;
    return Py_BuildValue("Kn", (unsigned long long)seed, (Py_ssize_t)hypothesis);
}

static PyMethodDef order_methods[] = {
    {"swap_forward", swap_forward, METH_VARARGS, "swap_forward(draws, order): shuffle as torch.randperm does"},
    {"swap_backward", swap_backward, METH_VARARGS,
     "swap_backward(draws, order) -> draws used to shuffle as random.shuffle does; -1 if they did not suffice"},
    {"swap_buffer", swap_buffer, METH_VARARGS,
     "swap_buffer(draws, order, buffer): fill an order as tf.data.Dataset.shuffle does"},
    {"search_seed", search_seed, METH_VARARGS,
     "search_seed(count, skipped, sightings, depth, begin, end) -> (seed, hypothesis), or None"},
    {NULL, NULL, 0, NULL},
};

int fsx_module_add_order(PyObject *module) {
    if (PyModule_AddIntConstant(module, "SEARCH_FIRST", FSX_SEARCH_FIRST) != 0 ||
        PyModule_AddIntConstant(module, "SEARCH_PLACES", FSX_SEARCH_PLACES) != 0)
        return -1;
    return PyModule_AddFunctions(module, order_methods);
}
