/* penstock._native: the part of the tuple path that runs once for every tuple, in C.
 *
 * It has five functions and a type. Each does only the usual case, and does it as the form in pure Python does it; every other case
 * is handed to the pure form, which raises the errors. Build: native/build.py. Without this module Penstock runs in
 * pure Python.
 *
 *   make_emit(pure, columns, stream, keyword, noted=None, note_none=False)
 *       Makes the function emit(values, stream=..., keyword=...) of a collector. It appends the values to columns.
 *   Rows(kind, columns)
 *       An iterator over the rows of columns as instances of ``kind``, a subclass of tuple.
 *   passes(values, kinds)
 *       Whether a receiver may get these very values.
 *   hash_bytes(offsets, data)
 *       The hash of each text in an Arrow column.
 *   order_by_target(hashes, count)
 *       The rows of each target, if ``hash % count`` is the target of a row.
 *   distribute(known, keys, columns, count)
 *       Divides the rows of columns among ``count`` targets, by the target that ``known`` has for each key.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef Py_GIL_DISABLED
#error "Without the GIL, a reference count of 1 does not prove that nobody else uses an object"
#endif

static PyObject *stream_keyword; /* "stream", interned as all keyword names in calls are */

typedef struct {
    PyTypeObject *emitter;
} State;

/* ---- Emitter --------------------------------------------------------------------------------------------------- */

/* What an emit function refers to. It is set once. Without tp_clear: every cycle through it contains a closure, a
 * list or a dict, which has one. */
typedef struct {
    PyObject_HEAD
    PyObject *pure;    /* emit in pure Python, for all other cases */
    PyObject *columns; /* a tuple of lists, one for each field */
    PyObject *stream;  /* the name of the default stream, compared by identity */
    PyObject *keyword; /* the name of the third argument: anchors or msg_id */
    PyObject *noted;   /* a list to which the third argument is appended, or NULL */
    int note_none;     /* append the third argument also if it is None */
} Emitter;

/* The values as an array, if they are a list or a tuple of the right length, else NULL. No error is set. A subclass
 * of tuple (such as the tuples that bolts receive) is read directly unless it iterates in its own way. */
static inline PyObject **
items_of(PyObject *values, Py_ssize_t width)
{
    PyTypeObject *type = Py_TYPE(values);
    if (type == &PyList_Type) {
        return PyList_GET_SIZE(values) == width ? ((PyListObject *)values)->ob_item : NULL;
    }
    if (type == &PyTuple_Type
        || (PyTuple_Check(values) && type->tp_iter == PyTuple_Type.tp_iter
            && type->tp_as_sequence->sq_length == PyTuple_Type.tp_as_sequence->sq_length)) {
        return PyTuple_GET_SIZE(values) == width ? ((PyTupleObject *)values)->ob_item : NULL;
    }
    return NULL;
}

static PyObject *
emitter_emit(Emitter *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames)
{
    PyObject *third = NULL;
    if (kwnames == NULL) {
        if (count != 1) {
            if (count < 1 || count > 3 || args[1] != self->stream) {
                goto other;
            }
            third = count == 3 ? args[2] : NULL;
        }
    }
    else if (count == 1 && PyTuple_GET_SIZE(kwnames) == 1) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, 0);
        if (name == self->keyword) {
            third = args[1];
        }
        else if (name != stream_keyword || args[1] != self->stream) {
            goto other;
        }
    }
    else {
        goto other;
    }
    PyObject *values = args[0], *columns = self->columns;
    Py_ssize_t width = PyTuple_GET_SIZE(columns);
    PyObject **items = items_of(values, width);
    if (items == NULL) {
        goto other;
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        if (PyList_Append(PyTuple_GET_ITEM(columns, i), items[i]) < 0) {
            return NULL;
        }
    }
    if (self->noted != NULL) {
        third = third == NULL ? Py_None : third;
        if ((self->note_none || third != Py_None) && PyList_Append(self->noted, third) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
other:
    return PyObject_Vectorcall(self->pure, args, count, kwnames);
}

static int
emitter_traverse(Emitter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->pure);
    Py_VISIT(self->columns);
    Py_VISIT(self->stream);
    Py_VISIT(self->keyword);
    Py_VISIT(self->noted);
    return 0;
}

static void
emitter_dealloc(Emitter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->pure);
    Py_XDECREF(self->columns);
    Py_XDECREF(self->stream);
    Py_XDECREF(self->keyword);
    Py_XDECREF(self->noted);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot emitter_slots[] = {
    {Py_tp_dealloc, emitter_dealloc},
    {Py_tp_traverse, emitter_traverse},
    {0, NULL},
};

static PyType_Spec emitter_spec = {
    .name = "penstock._native.Emitter",
    .basicsize = sizeof(Emitter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = emitter_slots,
};

static PyMethodDef emit_def = {
    "emit", (PyCFunction)(void (*)(void))emitter_emit, METH_FASTCALL | METH_KEYWORDS,
    "emit(values, stream='default', ...): append the values to the columns of the stream."};

static PyObject *
make_emit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pure", "columns", "stream", "keyword", "noted", "note_none", NULL};
    PyObject *pure, *columns, *stream, *keyword, *noted = Py_None;
    int note_none = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOUU|Op:make_emit", names, &pure, &columns, &stream, &keyword,
                                     &noted, &note_none)) {
        return NULL;
    }
    if (!PyCallable_Check(pure) || (noted != Py_None && !PyList_CheckExact(noted))) {
        PyErr_SetString(PyExc_TypeError, "make_emit needs a callable, and a list or None as noted");
        return NULL;
    }
    columns = PySequence_Tuple(columns);
    if (columns == NULL) {
        return NULL;
    }
    int lists = PyTuple_GET_SIZE(columns) > 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(columns); i++) {
        lists = lists && PyList_CheckExact(PyTuple_GET_ITEM(columns, i));
    }
    if (!lists) {
        Py_DECREF(columns);
        PyErr_SetString(PyExc_TypeError, "make_emit needs columns that are lists, at least one");
        return NULL;
    }
    PyTypeObject *type = ((State *)PyModule_GetState(module))->emitter;
    Emitter *self = (Emitter *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(columns);
        return NULL;
    }
    Py_INCREF(keyword);
    PyUnicode_InternInPlace(&keyword);
    self->pure = Py_NewRef(pure);
    self->columns = columns;
    self->stream = Py_NewRef(stream);
    self->keyword = keyword;
    self->noted = noted == Py_None ? NULL : Py_NewRef(noted);
    self->note_none = note_none;
    PyObject *emit = PyCFunction_New(&emit_def, (PyObject *)self); /* the interpreter calls it faster than an object */
    Py_DECREF(self);
    return emit;
}

/* ---- Rows ------------------------------------------------------------------------------------------------------ */

/* Objects that may be used again. While a loop asks for the next tuple it still holds the last one, so the tuple
 * that can be used again is the one before. */
#define KEPT 2
#define MOST_REUSED 8 /* the width up to which a tuple is used again */

typedef struct {
    PyObject_HEAD
    PyTypeObject *kind;
    PyObject *columns; /* a tuple of lists; NULL when all rows are read */
    Py_ssize_t next, rows;
    int reuse;
    int turn;
    PyObject *kept[KEPT];
} Rows;

static PyObject *
fresh_tuple(PyTypeObject *kind, Py_ssize_t width)
{
    /* A tuple subclass is allocated as PyTuple_Type.tp_new does it: by tp_alloc, with items that are NULL. */
    PyObject *made = kind->tp_alloc(kind, width);
#if PY_VERSION_HEX >= 0x030E0000
    if (made != NULL) {
        ((PyTupleObject *)made)->ob_hash = -1;
    }
#endif
    return made;
}

/* The next tuple that nobody else holds, with the items of an earlier row, or a new one without items. */
static PyObject *
take_tuple(Rows *self, Py_ssize_t width)
{
    PyObject *made = self->kept[self->turn];
    self->kept[self->turn] = NULL; /* taken: an item's destructor below may run any code */
    if (made != NULL) {
        if (Py_REFCNT(made) == 1) {
#if PY_VERSION_HEX >= 0x030E0000
            ((PyTupleObject *)made)->ob_hash = -1; /* the hash of the earlier items */
#endif
            return made;
        }
        Py_DECREF(made);
    }
    return fresh_tuple(self->kind, width);
}

static void
rows_release(Rows *self)
{
    Py_CLEAR(self->columns);
    for (int i = 0; i < KEPT; i++) {
        Py_CLEAR(self->kept[i]);
    }
}

static PyObject *
rows_next(Rows *self)
{
    if (self->next >= self->rows || self->columns == NULL) {
        rows_release(self);
        return NULL;
    }
    PyObject *columns = self->columns;
    Py_ssize_t width = PyTuple_GET_SIZE(columns), row = self->next;
    for (Py_ssize_t i = 0; i < width; i++) {
        if (row >= PyList_GET_SIZE(PyTuple_GET_ITEM(columns, i))) {
            PyErr_SetString(PyExc_RuntimeError, "a column became shorter while its rows were read");
            return NULL;
        }
    }
    PyObject *made = self->reuse ? take_tuple(self, width) : fresh_tuple(self->kind, width);
    if (made == NULL) {
        return NULL;
    }
    self->next = row + 1;
    PyObject **items = ((PyTupleObject *)made)->ob_item;
    PyObject *before[MOST_REUSED];
    if (width <= MOST_REUSED) { /* all items are new before the first old one is released */
        for (Py_ssize_t i = 0; i < width; i++) {
            before[i] = items[i];
            items[i] = Py_NewRef(PyList_GET_ITEM(PyTuple_GET_ITEM(columns, i), row));
        }
        if (self->reuse) {
            self->kept[self->turn] = Py_NewRef(made);
            self->turn ^= 1;
        }
        for (Py_ssize_t i = 0; i < width; i++) {
            Py_XDECREF(before[i]);
        }
        return made;
    }
    for (Py_ssize_t i = 0; i < width; i++) { /* never used again: see rows_new */
        items[i] = Py_NewRef(PyList_GET_ITEM(PyTuple_GET_ITEM(columns, i), row));
    }
    return made;
}

static PyObject *
rows_length_hint(Rows *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromSsize_t(self->rows - self->next);
}

static int
rows_traverse(Rows *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->kind);
    Py_VISIT(self->columns);
    for (int i = 0; i < KEPT; i++) {
        Py_VISIT(self->kept[i]);
    }
    return 0;
}

static int
rows_clear(Rows *self)
{
    rows_release(self);
    return 0;
}

static void
rows_dealloc(Rows *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    rows_release(self);
    Py_XDECREF(self->kind);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", "columns", NULL};
    PyTypeObject *kind;
    PyObject *columns;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O:Rows", names, &PyType_Type, &kind, &columns)) {
        return NULL;
    }
    if (!PyType_IsSubtype(kind, &PyTuple_Type) || kind == &PyTuple_Type || kind->tp_new != PyTuple_Type.tp_new
        || kind->tp_init != PyBaseObject_Type.tp_init) {
        PyErr_SetString(PyExc_TypeError, "Rows needs a subclass of tuple without a constructor of its own");
        return NULL;
    }
    columns = PySequence_Tuple(columns);
    if (columns == NULL) {
        return NULL;
    }
    Py_ssize_t width = PyTuple_GET_SIZE(columns), rows = -1;
    for (Py_ssize_t i = 0; i < width; i++) {
        PyObject *column = PyTuple_GET_ITEM(columns, i);
        if (!PyList_CheckExact(column) || (rows >= 0 && PyList_GET_SIZE(column) != rows)) {
            PyErr_SetString(PyExc_ValueError, "Rows needs columns that are lists of the same length");
            Py_DECREF(columns);
            return NULL;
        }
        rows = PyList_GET_SIZE(column);
    }
    Rows *self = (Rows *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(columns);
        return NULL;
    }
    self->kind = (PyTypeObject *)Py_NewRef((PyObject *)kind);
    self->columns = columns;
    self->rows = rows < 0 ? 0 : rows;
    /* A tuple with a __dict__ holds more than its items. */
    self->reuse = width > 0 && width <= MOST_REUSED && kind->tp_dictoffset == 0 && kind->tp_weaklistoffset == 0
                  && kind->tp_finalize == NULL;
    return (PyObject *)self;
}

static PyMethodDef rows_methods[] = {
    {"__length_hint__", (PyCFunction)rows_length_hint, METH_NOARGS, "The number of rows that are not yet read."},
    {NULL},
};

static PyType_Slot rows_slots[] = {
    {Py_tp_new, rows_new},
    {Py_tp_dealloc, rows_dealloc},
    {Py_tp_traverse, rows_traverse},
    {Py_tp_clear, rows_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, rows_next},
    {Py_tp_methods, rows_methods},
    {Py_tp_doc, "Rows(kind, columns): the rows of the columns as tuples of this class."},
    {0, NULL},
};

static PyType_Spec rows_spec = {
    .name = "penstock._native.Rows",
    .basicsize = sizeof(Rows),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = rows_slots,
};

/* ---- passes ---------------------------------------------------------------------------------------------------- */

/* 1 if Arrow accepts the text: it has no lone surrogate. */
static int
is_unicode(PyObject *text)
{
    int kind = PyUnicode_KIND(text);
    if (kind == PyUnicode_1BYTE_KIND) {
        return 1;
    }
    const void *data = PyUnicode_DATA(text);
    for (Py_ssize_t i = 0; i < PyUnicode_GET_LENGTH(text); i++) {
        Py_UCS4 character = PyUnicode_READ(kind, data, i);
        if (character >= 0xD800 && character <= 0xDFFF) {
            return 0;
        }
    }
    return 1;
}

/* 1 if a value of this type fits a column that is declared with it. */
static inline int
fits(PyObject *value)
{
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow && number != LLONG_MIN; /* the pure form refuses the least number, too */
    }
    return !PyUnicode_CheckExact(value) || is_unicode(value);
}

static PyObject *
passes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "passes needs a list and a type or a set of types");
        return NULL;
    }
    PyObject *values = args[0], *kinds = args[1];
    if (PyType_Check(kinds)) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
            PyObject *value = PyList_GET_ITEM(values, i);
            if (value != Py_None && ((PyObject *)Py_TYPE(value) != kinds || !fits(value))) {
                Py_RETURN_FALSE;
            }
        }
        Py_RETURN_TRUE;
    }
    PyTypeObject *last = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
        PyTypeObject *kind = Py_TYPE(PyList_GET_ITEM(values, i));
        if (kind != last) {
            int contained = PySet_Contains(kinds, (PyObject *)kind);
            if (contained <= 0) {
                return contained < 0 ? NULL : Py_NewRef(Py_False);
            }
            last = kind;
        }
    }
    Py_RETURN_TRUE;
}

/* ---- hash_bytes, order_by_target ------------------------------------------------------------------------------- */

/* topology/hashing.py has the same. */
#define PRIME 0x100000001B3ULL
#define GOLDEN 0x9E3779B97F4A7C15ULL
#define MIX1 0xBF58476D1CE4E5B9ULL
#define MIX2 0x94D049BB133111EBULL

static inline uint64_t
mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * MIX1;
    value = (value ^ (value >> 27)) * MIX2;
    return value ^ (value >> 31);
}

static PyObject *
hash_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer offsets, data;
    if (!PyArg_ParseTuple(args, "y*y*:hash_bytes", &offsets, &data)) {
        return NULL;
    }
    PyObject *result = NULL;
    Py_ssize_t count = offsets.len / (Py_ssize_t)sizeof(int64_t) - 1;
    const int64_t *ends = offsets.buf;
    const unsigned char *bytes = data.buf;
    if (count < 0 || ends[0] < 0 || ends[count] > data.len) {
        PyErr_SetString(PyExc_ValueError, "hash_bytes needs offsets within the data");
    } else {
        result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t));
    }
    if (result != NULL) {
        uint64_t *hashes = (uint64_t *)PyBytes_AS_STRING(result);
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t sum = 0, power = 1;
            int64_t end = ends[i + 1] < ends[count] ? ends[i + 1] : ends[count];
            for (int64_t at = ends[i] > 0 ? ends[i] : 0; at < end; at++) {
                sum += ((uint64_t)bytes[at] + 1) * power;
                power *= PRIME;
            }
            hashes[i] = mix(sum + (uint64_t)(ends[i + 1] - ends[i]) * GOLDEN);
        }
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *
order_by_target(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer hashes;
    long count;
    if (!PyArg_ParseTuple(args, "y*l:order_by_target", &hashes, &count)) {
        return NULL;
    }
    Py_ssize_t rows = hashes.len / (Py_ssize_t)sizeof(uint64_t);
    const uint64_t *hash = hashes.buf;
    PyObject *order = NULL, *result = NULL;
    uint16_t *targets = PyMem_Malloc((size_t)(rows ? rows : 1) * sizeof(uint16_t));
    Py_ssize_t *next = NULL;
    if (count < 1 || count > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "order_by_target needs 1 to 65535 targets");
        goto done;
    }
    next = PyMem_Calloc((size_t)count + 1, sizeof(Py_ssize_t));
    order = PyBytes_FromStringAndSize(NULL, rows * (Py_ssize_t)sizeof(int64_t));
    result = PyList_New(0);
    if (targets == NULL || next == NULL || order == NULL || result == NULL) {
        Py_CLEAR(result);
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t row = 0; row < rows; row++) {
        targets[row] = (uint16_t)(hash[row] % (uint64_t)count);
        next[targets[row] + 1]++;
    }
    for (long target = 0; target < count; target++) { /* from sizes to beginnings */
        if (next[target + 1]) {
            PyObject *part = Py_BuildValue("lnn", target, next[target], next[target] + next[target + 1]);
            if (part == NULL || PyList_Append(result, part) < 0) {
                Py_XDECREF(part);
                Py_CLEAR(result);
                goto done;
            }
            Py_DECREF(part);
        }
        next[target + 1] += next[target];
    }
    int64_t *ordered = (int64_t *)PyBytes_AS_STRING(order);
    for (Py_ssize_t row = 0; row < rows; row++) {
        ordered[next[targets[row]]++] = row;
    }
done:
    PyMem_Free(targets);
    PyMem_Free(next);
    PyBuffer_Release(&hashes);
    if (result == NULL) {
        Py_XDECREF(order);
        return NULL;
    }
    return Py_BuildValue("NN", order, result);
}

/* ---- distribute ------------------------------------------------------------------------------------------------ */

/* The part of one target: (target, indices of its rows as bytes of int64, its rows of each column), with room for
 * ``size`` rows that are not set yet. */
static PyObject *
make_part(Py_ssize_t target, Py_ssize_t size, Py_ssize_t width)
{
    PyObject *indices = PyBytes_FromStringAndSize(NULL, size * (Py_ssize_t)sizeof(int64_t));
    PyObject *columns = PyList_New(width);
    for (Py_ssize_t i = 0; columns != NULL && i < width; i++) {
        PyObject *column = PyList_New(size);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyList_SET_ITEM(columns, i, column);
        }
    }
    if (indices == NULL || columns == NULL) {
        Py_XDECREF(indices);
        Py_XDECREF(columns);
        return NULL;
    }
    return Py_BuildValue("nNN", target, indices, columns);
}

/* The target of each row in ``targets`` and the number of rows of each target in ``sizes``. Returns 1, 0 if a key is
 * not known, or -1 with an error set. */
static int
find_targets(PyObject *known, PyObject *keys, Py_ssize_t rows, uint16_t *targets, Py_ssize_t *sizes, long count)
{
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyObject *found = PyDict_GetItemWithError(known, PyList_GET_ITEM(keys, row));
        if (found == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        long target = PyLong_AsLong(found);
        if (target < 0 || target >= count || PyList_GET_SIZE(keys) != rows) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "distribute needs targets below count and keys that stay");
            }
            return -1;
        }
        targets[row] = (uint16_t)target;
        sizes[target]++;
    }
    return 1;
}

/* The parts of all targets that have rows. No code of users runs here, so the columns stay as they are. */
static PyObject *
make_parts(PyObject *columns, Py_ssize_t rows, const uint16_t *targets, const Py_ssize_t *sizes, long count)
{
    Py_ssize_t width = PyTuple_GET_SIZE(columns);
    PyObject *result = PyList_New(0);
    PyObject **part_of = PyMem_Calloc((size_t)count, sizeof(PyObject *));
    Py_ssize_t *filled = PyMem_Calloc((size_t)count, sizeof(Py_ssize_t));
    if (result == NULL || part_of == NULL || filled == NULL) {
        goto failed;
    }
    for (long target = 0; target < count; target++) {
        if (sizes[target]) {
            PyObject *part = make_part(target, sizes[target], width);
            if (part == NULL || PyList_Append(result, part) < 0) {
                Py_XDECREF(part);
                goto failed;
            }
            part_of[target] = part;
            Py_DECREF(part); /* the result holds it */
        }
    }
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyObject *part = part_of[targets[row]];
        Py_ssize_t place = filled[targets[row]]++;
        int64_t *indices = (int64_t *)PyBytes_AS_STRING(PyTuple_GET_ITEM(part, 1));
        PyObject *into = PyTuple_GET_ITEM(part, 2);
        indices[place] = row;
        for (Py_ssize_t i = 0; i < width; i++) {
            PyObject *value = PyList_GET_ITEM(PyTuple_GET_ITEM(columns, i), row);
            PyList_SET_ITEM(PyList_GET_ITEM(into, i), place, Py_NewRef(value));
        }
    }
    PyMem_Free(part_of);
    PyMem_Free(filled);
    return result;
failed:
    PyMem_Free(part_of);
    PyMem_Free(filled);
    Py_XDECREF(result);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyObject *
distribute(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *known, *keys, *columns, *result = NULL;
    long count;
    if (!PyArg_ParseTuple(args, "O!O!O!l:distribute", &PyDict_Type, &known, &PyList_Type, &keys, &PyTuple_Type,
                          &columns, &count)) {
        return NULL;
    }
    Py_ssize_t rows = PyList_GET_SIZE(keys);
    if (count < 1 || count > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "distribute needs 1 to 65535 targets");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(columns); i++) {
        PyObject *column = PyTuple_GET_ITEM(columns, i);
        if (!PyList_CheckExact(column) || PyList_GET_SIZE(column) != rows) {
            PyErr_SetString(PyExc_ValueError, "distribute needs columns that are lists as long as the keys");
            return NULL;
        }
    }
    uint16_t *targets = PyMem_Malloc((size_t)(rows ? rows : 1) * sizeof(uint16_t));
    Py_ssize_t *sizes = PyMem_Calloc((size_t)count, sizeof(Py_ssize_t));
    if (targets == NULL || sizes == NULL) {
        PyErr_NoMemory();
    } else {
        int found = find_targets(known, keys, rows, targets, sizes, count);
        if (found > 0) {
            result = make_parts(columns, rows, targets, sizes, count);
        } else if (found == 0) {
            result = Py_NewRef(Py_None);
        }
    }
    PyMem_Free(targets);
    PyMem_Free(sizes);
    return result;
}

/* ---- the module ------------------------------------------------------------------------------------------------ */

static int
module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (stream_keyword == NULL && (stream_keyword = PyUnicode_InternFromString("stream")) == NULL) {
        return -1;
    }
    state->emitter = (PyTypeObject *)PyType_FromModuleAndSpec(module, &emitter_spec, NULL);
    if (state->emitter == NULL || PyModule_AddStringConstant(module, "SOURCE", PENSTOCK_SOURCE) < 0) {
        return -1;
    }
    PyObject *rows = PyType_FromModuleAndSpec(module, &rows_spec, NULL);
    int added = rows == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)rows);
    Py_XDECREF(rows);
    return added;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((State *)PyModule_GetState(module))->emitter);
    return 0;
}

static int
module_clear(PyObject *module)
{
    Py_CLEAR(((State *)PyModule_GetState(module))->emitter);
    return 0;
}

static PyMethodDef module_methods[] = {
    {"make_emit", (PyCFunction)(void (*)(void))make_emit, METH_VARARGS | METH_KEYWORDS,
     "make_emit(pure, columns, stream, keyword, noted=None, note_none=False): make the emit of a collector."},
    {"passes", (PyCFunction)(void (*)(void))passes, METH_FASTCALL,
     "passes(values, kinds): whether all values have the type, or one of the types, and fit a column of it."},
    {"hash_bytes", hash_bytes, METH_VARARGS,
     "hash_bytes(offsets, data): the hash of each value of a column of texts or bytes."},
    {"order_by_target", order_by_target, METH_VARARGS,
     "order_by_target(hashes, count): the rows in the order of their targets, and where the rows of each begin and end."},
    {"distribute", distribute, METH_VARARGS,
     "distribute(known, keys, columns, count): divide the rows of columns among targets. None if a key is not known."},
    {NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "penstock._native",
    .m_doc = "The part of the tuple path that runs once for every tuple, in C.",
    .m_size = sizeof(State),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
