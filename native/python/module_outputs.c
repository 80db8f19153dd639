/* module_outputs.c: what of fanstore._native.Engine is about outputs. Translates arguments and nothing else. */
#define PY_SSIZE_T_CLEAN
#include "python/module_engine.h"

static struct fsx_outputs *outputs_of(const EngineObject *self) {
    if (self->settings.tree.outputs == NULL)
        PyErr_SetString(PyExc_ValueError, "the engine was made without outputs");
    return self->settings.tree.outputs;
}

PyObject *fsx_engine_add_name(EngineObject *self, PyObject *args) {
    unsigned long long parent, directory = 0;
    Py_buffer name;
    if (!PyArg_ParseTuple(args, "Ky*|K", &parent, &name, &directory))
        return NULL;
    struct fsx_outputs *outputs = outputs_of(self);
    const bool added = outputs != NULL && fsx_outputs_add_name(outputs, parent, name.buf, (size_t)name.len, directory);
    PyBuffer_Release(&name);
    if (outputs == NULL)
        return NULL;
    if (!added)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *fsx_engine_remove_name(EngineObject *self, PyObject *args) {
    unsigned long long parent;
    Py_buffer name;
    if (!PyArg_ParseTuple(args, "Ky*", &parent, &name))
        return NULL;
    struct fsx_outputs *outputs = outputs_of(self);
    const bool there = outputs != NULL && fsx_outputs_remove_name(outputs, parent, name.buf, (size_t)name.len);
    PyBuffer_Release(&name);
    return outputs == NULL ? NULL : PyBool_FromLong(there);
}

PyObject *fsx_engine_mix(EngineObject *self, PyObject *argument) {
    const unsigned long entry = PyLong_AsUnsignedLong(argument);
    struct fsx_outputs *outputs = PyErr_Occurred() ? NULL : outputs_of(self);
    if (outputs == NULL)
        return NULL;
    if (entry > UINT32_MAX || !fsx_outputs_mix(outputs, (uint32_t)entry)) {
        PyErr_SetString(PyExc_ValueError, "there is no such entry");
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *fsx_engine_describe(EngineObject *self, PyObject *args) {
    unsigned long long inode, size, blocks;
    long long mtime_ns;
    unsigned int mode, nlink, uid, gid, valid_s;
    if (!PyArg_ParseTuple(args, "KIIKKLIII", &inode, &mode, &nlink, &size, &blocks, &mtime_ns, &uid, &gid, &valid_s))
        return NULL;
    struct fsx_outputs *outputs = outputs_of(self);
    if (outputs == NULL)
        return NULL;
    if (inode == 0) {
        PyErr_SetString(PyExc_ValueError, "0 is no inode");
        return NULL;
    }
    struct fuse_attr_out out = {.attr_valid = valid_s};
    struct fuse_attr *attr = &out.attr;
    *attr = (struct fuse_attr){.ino = inode, .mode = mode, .nlink = nlink, .size = size, .blocks = blocks, .uid = uid,
                              .gid = gid, .blksize = 4096};
    fsx_fill_times(attr, mtime_ns);
    if (!fsx_outputs_describe(outputs, &out))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *fsx_engine_undescribe(EngineObject *self, PyObject *argument) {
    const unsigned long long inode = PyLong_AsUnsignedLongLong(argument);
    struct fsx_outputs *outputs = PyErr_Occurred() ? NULL : outputs_of(self);
    if (outputs == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(fsx_outputs_undescribe(outputs, inode));
}

PyObject *fsx_engine_take_told(EngineObject *self, PyObject *argument) {
    const unsigned long long inode = PyLong_AsUnsignedLongLong(argument);
    struct fsx_outputs *outputs = PyErr_Occurred() ? NULL : outputs_of(self);
    return outputs == NULL ? NULL : PyLong_FromUnsignedLongLong(fsx_outputs_take_told(outputs, inode));
}

PyObject *fsx_engine_drop(EngineObject *self, PyObject *argument) {
    const unsigned long long inode = PyLong_AsUnsignedLongLong(argument);
    struct fsx_outputs *outputs = PyErr_Occurred() ? NULL : outputs_of(self);
    if (outputs == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fsx_outputs_drop(outputs, inode);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *fsx_engine_open(EngineObject *self, PyObject *arguments) {
    unsigned long long inode;
    unsigned int flags;
    if (!PyArg_ParseTuple(arguments, "KI", &inode, &flags))
        return NULL;
    struct fsx_outputs *outputs = outputs_of(self);
    if (outputs == NULL)
        return NULL;
    const struct fsx_opened opened = fsx_outputs_open(outputs, inode, flags);
    return opened.handle == 0 ? PyErr_NoMemory() : PyLong_FromUnsignedLongLong(opened.handle);
}

/* ---- new files ---------------------------------------------------------------------------------------------------- */

static struct fsx_creates *creates_of(const EngineObject *self) {
    struct fsx_outputs *outputs = outputs_of(self);
    return outputs == NULL ? NULL : fsx_outputs_creates(outputs);
}

/* In a turn: all of them, as a list; they are Python's then, whatever becomes of the list. */
static PyObject *take(struct fsx_creates *creates) {
    size_t count;
    const struct fsx_create *file = fsx_creates_take(creates, &count);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++, file++) {
        PyObject *noted = file->noted
                              ? Py_BuildValue("KLL", (unsigned long long)file->size, (long long)file->noted_mtime_ns,
                                              (long long)file->noted_ctime_ns)
                              : Py_NewRef(Py_None);
        PyObject *item = noted == NULL
                             ? NULL
                             : Py_BuildValue("KKy#ILN", (unsigned long long)file->inode,
                                             (unsigned long long)file->parent, (const char *)file->name,
                                             (Py_ssize_t)file->name_bytes, file->mode, (long long)file->mtime_ns, noted);
        if (item == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
    }
    return result;
}

PyObject *fsx_engine_has_creates(EngineObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_creates *creates = creates_of(self);
    return creates == NULL ? NULL : PyBool_FromLong(fsx_creates_any(creates));
}

PyObject *fsx_engine_take_creates(EngineObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_creates *creates = creates_of(self);
    if (creates == NULL)
        return NULL;
    fsx_creates_begin(creates); /* with the GIL: or it would be waited for in the turn, while engine threads wait for that */
    PyObject *result = take(creates);
    fsx_creates_end(creates);
    return result;
}

PyObject *fsx_engine_begin_turn(EngineObject *self, PyObject *unused) {
    (void)unused;
    struct fsx_creates *creates = creates_of(self);
    if (creates == NULL)
        return NULL;
    fsx_creates_begin(creates); /* with the GIL: or it would be waited for in the turn, while engine threads wait for that */
    PyObject *list = take(creates);
    PyObject *result = list == NULL ? NULL : Py_BuildValue("NL", list, (long long)fsx_creates_journal_end(creates));
    if (result == NULL)
        fsx_creates_end(creates);
    return result;
}

PyObject *fsx_engine_disown(EngineObject *self, PyObject *argument) {
    const unsigned long long inode = PyLong_AsUnsignedLongLong(argument);
    struct fsx_creates *creates = PyErr_Occurred() ? NULL : creates_of(self);
    if (creates == NULL)
        return NULL;
    fsx_creates_disown(creates, inode);
    Py_RETURN_NONE;
}

PyObject *fsx_engine_own(EngineObject *self, PyObject *argument) {
    const unsigned long long inode = PyLong_AsUnsignedLongLong(argument);
    struct fsx_creates *creates = PyErr_Occurred() ? NULL : creates_of(self);
    if (creates == NULL)
        return NULL;
    fsx_creates_own(creates, inode);
    Py_RETURN_NONE;
}

PyObject *fsx_engine_end_turn(EngineObject *self, PyObject *args) {
    unsigned long long next_inode;
    long long journal_end;
    struct fsx_outputs *outputs = outputs_of(self);
    if (outputs == NULL || !PyArg_ParseTuple(args, "KL", &next_inode, &journal_end))
        return NULL;
    fsx_outputs_end_turn(outputs, next_inode, journal_end);
    Py_RETURN_NONE;
}
