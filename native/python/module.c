/* module.c: fanstore._native, the door between Python and the C core. Translates arguments and nothing else.
 * The types for MPI are in exchange_type.c.
 *
 * Typed for Python in fanstore/_native.pyi. Long work runs without the GIL.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

#include "python/exchange_type.h"
#include "format/index.h"
#include "prep/listing.h"
#include "python/module.h"
#include "prep/pack.h"
#include "base/pages.h"
#include "prep/tarhead.h"

/* ---- Index ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer buffer; /* keeps the bytes alive and unchanged in place */
    struct fsx_index index;
} IndexObject;

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"buffer", NULL};
    Py_buffer buffer;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*", keywords, &buffer))
        return NULL;
    struct fsx_index index;
    struct fsx_problem problem;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsx_index_open(buffer.buf, (size_t)buffer.len, &index, &problem);
    Py_END_ALLOW_THREADS
    if (status != 0) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError, problem.text);
        return NULL;
    }
    IndexObject *self = (IndexObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&buffer);
        return NULL;
    }
    self->buffer = buffer;
    self->index = index;
    return (PyObject *)self;
}

static void index_dealloc(IndexObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&self->buffer);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *index_lookup(IndexObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "lookup(directory: int, name: bytes)");
        return NULL;
    }
    const long long directory = PyLong_AsLongLong(args[0]);
    if (directory == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLongLong(fsx_index_lookup(&self->index, directory < 0 ? UINT64_MAX : (uint64_t)directory,
                                                (const uint8_t *)PyBytes_AS_STRING(args[1]),
                                                (size_t)PyBytes_GET_SIZE(args[1])));
}

static PyMethodDef index_methods[] = {
    {"lookup", (PyCFunction)(void (*)(void))index_lookup, METH_FASTCALL, "lookup(directory, name) -> entry number or -1"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot index_slots[] = {
    {Py_tp_doc, "Index(buffer): a checked index.fsx; raises ValueError with half a sentence if it is refused."},
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, index_methods},
    {0, NULL},
};

const struct fsx_index *fsx_index_of(PyObject *object) {
    /* The type is made once per module and has no subclass: its name is enough to know it by. */
    if (strcmp(Py_TYPE(object)->tp_name, "fanstore._native.Index") != 0) {
        PyErr_SetString(PyExc_TypeError, "an Index is needed");
        return NULL;
    }
    return &((IndexObject *)object)->index;
}

static PyType_Spec index_spec = {"fanstore._native.Index", sizeof(IndexObject), 0, Py_TPFLAGS_DEFAULT, index_slots};

/* ---- Packer --------------------------------------------------------------------------------------------------- */

enum column { C_PARENT, C_NAMEOFF, C_NAMES, C_MODE, C_MTIME, C_SIZE, C_UID, C_GID, C_SOURCE, C_ORIGIN, C_INODE, C_PLAIN,
              C_LINKS, COLUMNS };
static const struct {
    const char *name;
    Py_ssize_t item_bytes;
} COLUMN[COLUMNS] = {
    {"parent", 4}, {"nameoff", 8}, {"names", 1},  {"mode", 4},   {"mtime", 8}, {"size", 8}, {"uid", 4},
    {"gid", 4},    {"source", 4},  {"origin", 8}, {"inode", 4},  {"plain", 1}, {"links", 1},
};

typedef struct {
    PyObject_HEAD
    Py_buffer columns[COLUMNS];
    int columns_held;
    struct fsx_pack_source *sources;
    struct fsx_table table;
} PackerObject;

static void packer_dealloc(PackerObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (int c = 0; c < self->columns_held; c++)
        PyBuffer_Release(&self->columns[c]);
    PyMem_Free(self->sources);
    type->tp_free(self);
    Py_DECREF(type);
}

static bool packer_take_sources(PackerObject *self, PyObject *sources) {
    const Py_ssize_t count = PyList_Size(sources);
    if (count < 0)
        return false;
    self->sources = PyMem_Calloc((size_t)count + 1, sizeof *self->sources);
    if (self->sources == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int is_tar, follow;
        Py_ssize_t prefix_bytes;
        if (!PyArg_ParseTuple(PyList_GetItem(sources, i), "ippn", &self->sources[i].fd, &is_tar, &follow, &prefix_bytes))
            return false;
        self->sources[i].prefix_bytes = (size_t)prefix_bytes;
        self->sources[i].follow = follow != 0;
        self->sources[i].kind = is_tar ? FSX_PACK_TAR : FSX_PACK_DIRECTORY;
    }
    self->table.sources = self->sources;
    self->table.sources_count = (uint32_t)count;
    return true;
}

static bool packer_take_columns(PackerObject *self, PyObject *columns) {
    for (int c = 0; c < COLUMNS; c++) {
        PyObject *column = PyDict_GetItemString(columns, COLUMN[c].name);
        if (column == NULL) {
            PyErr_Format(PyExc_KeyError, "no column '%s'", COLUMN[c].name);
            return false;
        }
        if (PyObject_GetBuffer(column, &self->columns[c], PyBUF_SIMPLE) != 0)
            return false;
        self->columns_held = c + 1;
    }
    const Py_ssize_t entries = self->columns[C_PARENT].len / 4;
    for (int c = 0; c < COLUMNS; c++) {
        const Py_ssize_t items = c == C_NAMEOFF ? entries + 1 : entries;
        if (c != C_NAMES && c != C_LINKS && self->columns[c].len != items * COLUMN[c].item_bytes) {
            PyErr_Format(PyExc_ValueError, "column '%s' has %zd bytes, not %zd", COLUMN[c].name, self->columns[c].len,
                         items * COLUMN[c].item_bytes);
            return false;
        }
    }
    struct fsx_table *t = &self->table;
    t->entries = (uint32_t)entries;
    t->parent = self->columns[C_PARENT].buf;
    t->nameoff = self->columns[C_NAMEOFF].buf;
    t->names = self->columns[C_NAMES].buf;
    t->names_bytes = (uint64_t)self->columns[C_NAMES].len;
    t->mode = self->columns[C_MODE].buf;
    t->mtime = self->columns[C_MTIME].buf;
    t->size = self->columns[C_SIZE].buf;
    t->uid = self->columns[C_UID].buf;
    t->gid = self->columns[C_GID].buf;
    t->source = self->columns[C_SOURCE].buf;
    t->origin = self->columns[C_ORIGIN].buf;
    t->inode = self->columns[C_INODE].buf;
    t->plain = self->columns[C_PLAIN].buf;
    t->links = self->columns[C_LINKS].buf;
    t->links_bytes = (uint64_t)self->columns[C_LINKS].len;
    return true;
}

static PyObject *packer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"columns", "sources", NULL};
    PyObject *columns, *sources;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!", keywords, &PyDict_Type, &columns, &PyList_Type, &sources))
        return NULL;
    PackerObject *self = (PackerObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (!packer_take_sources(self, sources) || !packer_take_columns(self, columns)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *packer_pack(PackerObject *self, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"order", "codec", "level", "out", "scratch", "packed", "chunks", NULL};
    Py_buffer order, out, scratch, packed, chunks;
    unsigned int number;
    int level;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*Iiw*w*w*w*", keywords, &order, &number, &level, &out, &scratch,
                                     &packed, &chunks))
        return NULL;
    struct fsx_batch batch = {
        .order = order.buf,
        .order_count = (size_t)order.len / sizeof(uint32_t),
        .codec = fsx_codec_find(number),
        .level = level,
        .out = out.buf,
        .out_bytes = (size_t)out.len,
        .scratch = scratch.buf,
        .scratch_bytes = (size_t)scratch.len,
        .packed = packed.buf,
        .chunks = chunks.buf,
        .chunks_room = (size_t)chunks.len / sizeof(struct fsx_chunk),
    };
    int status = 0;
    const bool fits = batch.codec != NULL && (size_t)packed.len >= batch.order_count * sizeof(struct fsx_packed);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = fsx_pack(&self->table, &batch);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&order);
    PyBuffer_Release(&out);
    PyBuffer_Release(&scratch);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&chunks);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "no such codec, or packed has less than 32 bytes per entry");
        return NULL;
    }
    if (status != 0) {
        errno = status;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("nn", (Py_ssize_t)batch.out_used, (Py_ssize_t)batch.chunks_used);
}

static PyMethodDef packer_methods[] = {
    {"pack", (PyCFunction)(void (*)(void))packer_pack, METH_VARARGS | METH_KEYWORDS,
     "pack(order, codec, level, out, scratch, packed, chunks) -> (bytes of out used, records of chunks used)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot packer_slots[] = {
    {Py_tp_doc, "Packer(columns, sources): packs entries of a scanned tree into tar members."},
    {Py_tp_new, packer_new},
    {Py_tp_dealloc, packer_dealloc},
    {Py_tp_methods, packer_methods},
    {0, NULL},
};

static PyType_Spec packer_spec = {"fanstore._native.Packer", sizeof(PackerObject), 0, Py_TPFLAGS_DEFAULT, packer_slots};

/* ---- Listing -------------------------------------------------------------------------------------------------- */

/* Entries that a scan must look at one by one: all but files with one name. */
static bool is_special(const struct fsx_listed *entry) { return !S_ISREG(entry->mode) || entry->nlink > 1; }

/* Add a column to `result`; returns its memory, or NULL with an exception set. */
static void *add_column(PyObject *result, const char *name, size_t bytes) {
    PyObject *column = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (column == NULL)
        return NULL;
    const int status = PyDict_SetItemString(result, name, column);
    Py_DECREF(column); /* the dictionary keeps it */
    return status == 0 ? PyBytes_AS_STRING(column) : NULL;
}

static PyObject *listing_columns(const struct fsx_listing *listing) {
    const struct fsx_listed *entries = listing->entries.items;
    const size_t count = listing->entries.used;
    size_t specials = 0, names_bytes = 0;
    for (size_t i = 0; i < count; i++) {
        specials += is_special(&entries[i]);
        names_bytes += entries[i].name_bytes;
    }
    PyObject *result = PyDict_New();
    if (result == NULL)
        return NULL;
    uint8_t *names = add_column(result, "names", names_bytes);
    uint32_t *name_bytes = add_column(result, "name_bytes", count * 4);
    uint32_t *mode = add_column(result, "mode", count * 4);
    int64_t *mtime = add_column(result, "mtime", count * 8);
    uint64_t *size = add_column(result, "size", count * 8);
    uint32_t *uid = add_column(result, "uid", count * 4);
    uint32_t *gid = add_column(result, "gid", count * 4);
    uint64_t *target = add_column(result, "target", count * 8);
    uint64_t *dev = add_column(result, "dev", count * 8);
    uint64_t *ino = add_column(result, "ino", count * 8);
    uint32_t *nlink = add_column(result, "nlink", count * 4);
    uint8_t *plain = add_column(result, "plain", count);
    uint32_t *special = add_column(result, "special", specials * 4);
    uint8_t *targets = add_column(result, "targets", listing->targets.used);
    if (!names || !name_bytes || !mode || !mtime || !size || !uid || !gid || !target || !dev || !ino || !nlink || !plain ||
        !special || !targets) {
        Py_DECREF(result);
        return NULL;
    }
    if (listing->targets.used > 0)
        memcpy(targets, listing->targets.items, listing->targets.used);
    for (size_t i = 0; i < count; i++) {
        const struct fsx_listed *entry = &entries[i];
        memcpy(names, (uint8_t *)listing->names.items + entry->name, entry->name_bytes);
        names += entry->name_bytes;
        name_bytes[i] = entry->name_bytes;
        mode[i] = entry->mode;
        mtime[i] = entry->mtime_ns;
        size[i] = entry->size;
        uid[i] = entry->uid;
        gid[i] = entry->gid;
        target[i] = entry->target;
        dev[i] = entry->dev;
        ino[i] = entry->ino;
        nlink[i] = entry->nlink;
        plain[i] = entry->plain;
        if (is_special(entry))
            *special++ = (uint32_t)i;
    }
    return result;
}

static PyObject *listing_failed(const struct fsx_listing *listing) {
    const struct fsx_unlisted *failed = listing->failed.items;
    PyObject *result = PyList_New((Py_ssize_t)listing->failed.used);
    for (size_t i = 0; result != NULL && i < listing->failed.used; i++) {
        PyObject *item = Py_BuildValue("y#i", (char *)listing->names.items + failed[i].name,
                                       (Py_ssize_t)failed[i].name_bytes, failed[i].error);
        if (item == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
    }
    return result;
}

static PyObject *list_directory(PyObject *module, PyObject *args) {
    (void)module;
    int fd, follow;
    Py_buffer above;
    if (!PyArg_ParseTuple(args, "ipy*", &fd, &follow, &above))
        return NULL;
    const struct fsx_links links = {
        .follow = follow != 0,
        .above = above.buf,
        .above_count = (size_t)above.len / sizeof(struct fsx_directory_id),
    };
    struct fsx_listing listing = {0};
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsx_listing_read(fd, &links, &listing);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&above);
    PyObject *columns = listing_columns(&listing);
    PyObject *failed = listing_failed(&listing);
    const size_t skipped = listing.skipped;
    fsx_listing_free(&listing);
    if (columns == NULL || failed == NULL) {
        Py_XDECREF(columns);
        Py_XDECREF(failed);
        return NULL;
    }
    return Py_BuildValue("NNni", columns, failed, (Py_ssize_t)skipped, status);
}

static PyObject *start_writing(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    unsigned long long offset, bytes;
    if (!PyArg_ParseTuple(args, "iKK", &fd, &offset, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fsx_pages_start_writing(fd, offset, bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- Module --------------------------------------------------------------------------------------------------- */

static PyObject *pack_scratch(PyObject *module, PyObject *argument) {
    (void)module;
    const unsigned long long bytes = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromSize_t(fsx_pack_scratch(bytes));
}

static PyObject *tar_file_header(PyObject *module, PyObject *args) {
    (void)module;
    const char *path;
    Py_ssize_t path_bytes;
    unsigned int mode, uid, gid;
    long long mtime_ns;
    unsigned long long size, size_largest;
    long long position = -1;
    if (!PyArg_ParseTuple(args, "y#IIILKK|L", &path, &path_bytes, &mode, &uid, &gid, &mtime_ns, &size, &size_largest,
                          &position))
        return NULL;
    const size_t bound = fsx_tar_header_bound((size_t)path_bytes, 0) + FSX_TAR_FILL_MAX;
    uint8_t *buffer = PyMem_Malloc(bound);
    if (buffer == NULL)
        return PyErr_NoMemory();
    const struct fsx_tar_member member = {
        .path = (const uint8_t *)path, .path_bytes = (size_t)path_bytes, .size = size, .size_largest = size_largest,
        .mtime_ns = mtime_ns, .mode = mode, .uid = uid, .gid = gid, .type = FSX_TAR_FILE,
        .position = (uint64_t)position, .align = position >= 0,
    };
    const size_t used = fsx_tar_header(&member, buffer, bound);
    PyObject *result = PyBytes_FromStringAndSize((const char *)buffer, (Py_ssize_t)used);
    PyMem_Free(buffer);
    return result;
}

static PyObject *tar_fill(PyObject *module, PyObject *argument) {
    (void)module;
    const unsigned long long position = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    uint8_t buffer[FSX_TAR_FILL_MAX];
    return PyBytes_FromStringAndSize((const char *)buffer, (Py_ssize_t)fsx_tar_fill(position, buffer));
}

static PyObject *all_zero(PyObject *module, PyObject *argument) {
    (void)module;
    Py_buffer buffer;
    if (PyObject_GetBuffer(argument, &buffer, PyBUF_SIMPLE) != 0)
        return NULL;
    const uint8_t *bytes = buffer.buf;
    bool zero;
    Py_BEGIN_ALLOW_THREADS
    /* Zero if the first byte is and every byte equals the one after it. */
    zero = buffer.len == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, (size_t)buffer.len - 1) == 0);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(zero);
}

static PyObject *decode_chunk(PyObject *module, PyObject *args) {
    (void)module;
    unsigned int number;
    Py_buffer stored, content;
    int first;
    if (!PyArg_ParseTuple(args, "Iy*pw*", &number, &stored, &first, &content))
        return NULL;
    const struct fsx_codec *codec = fsx_codec_find(number);
    const bool compresses = codec != NULL && codec->decode != NULL;
    bool decoded = false;
    if (compresses) {
        Py_BEGIN_ALLOW_THREADS
        decoded = codec->decode(stored.buf, (size_t)stored.len, first != 0, content.buf, (size_t)content.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&stored);
    PyBuffer_Release(&content);
    if (!compresses)
        return PyErr_Format(PyExc_ValueError, "codec %u does not compress", number);
    return PyBool_FromLong(decoded);
}

static PyObject *pages_resident(PyObject *module, PyObject *argument) {
    (void)module;
    Py_buffer buffer;
    if (PyObject_GetBuffer(argument, &buffer, PyBUF_SIMPLE) != 0)
        return NULL;
    const bool resident = fsx_pages_resident(buffer.buf, (size_t)buffer.len);
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(resident);
}

static PyObject *populate_pages(PyObject *module, PyObject *argument) {
    (void)module;
    Py_buffer buffer;
    if (PyObject_GetBuffer(argument, &buffer, PyBUF_SIMPLE) != 0)
        return NULL;
    bool populated;
    Py_BEGIN_ALLOW_THREADS
    populated = fsx_pages_populate(buffer.buf, (size_t)buffer.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(populated);
}

static PyMethodDef module_methods[] = {
    {"list_directory", list_directory, METH_VARARGS,
     "list_directory(fd, follow links, directories above as pairs of 64-bit dev and ino)\n"
     "-> (columns by name, [(name, errno) that failed], number skipped, errno of the listing)"},
    {"pages_resident", pages_resident, METH_O, "pages_resident(buffer) -> whether all its pages are in memory"},
    {"populate_pages", populate_pages, METH_O,
     "populate_pages(buffer) -> whether all its pages could be brought into memory"},
    {"start_writing", start_writing, METH_VARARGS,
     "start_writing(fd, offset, length): let the kernel begin to bring this range of a file to the disk"},
    {"decode_chunk", decode_chunk, METH_VARARGS,
     "decode_chunk(codec, stored, first, content) -> whether content, a buffer of its length, was filled"},
    {"all_zero", all_zero, METH_O, "all_zero(buffer) -> whether every byte is zero"},
    {"tar_file_header", tar_file_header, METH_VARARGS,
     "tar_file_header(path, mode, uid, gid, mtime_ns, size, size_largest, position=-1) -> the header(s) of a regular file, "
     "which end at a multiple of a page if they begin at position"},
    {"tar_fill", tar_fill, METH_O,
     "tar_fill(position) -> a header that means nothing, from there to a multiple of a page; empty if it is one"},
    {"pack_scratch", pack_scratch, METH_O, "pack_scratch(largest_file) -> bytes of scratch memory that Packer.pack needs"},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    PyObject *index = PyType_FromSpec(&index_spec);
    if (index == NULL || PyModule_AddObjectRef(module, "Index", index) != 0) {
        Py_XDECREF(index);
        return -1;
    }
    Py_DECREF(index);
    PyObject *packer = PyType_FromSpec(&packer_spec);
    if (packer == NULL || PyModule_AddObjectRef(module, "Packer", packer) != 0) {
        Py_XDECREF(packer);
        return -1;
    }
    Py_DECREF(packer);
    if (fsx_module_add_broker(module) != 0 || fsx_module_add_engine(module) != 0 || fsx_add_exchange_types(module) != 0 ||
        fsx_module_add_order(module) != 0)
        return -1;
    if (PyModule_AddIntConstant(module, "PACK_CHANGED", FSX_PACK_CHANGED) != 0 ||
        PyModule_AddIntConstant(module, "PACK_NO_ROOM", FSX_PACK_NO_ROOM) != 0 ||
        PyModule_AddIntConstant(module, "PACK_BAD_TABLE", FSX_PACK_BAD_TABLE) != 0 ||
        PyModule_AddIntConstant(module, "PACK_NO_CONTENT", FSX_PACK_NO_CONTENT) != 0 ||
        PyModule_AddIntConstant(module, "CHUNK_BYTES", FSX_CHUNK_BYTES) != 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_native", "The C core of FanStore.", 0, module_methods, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_def); }
