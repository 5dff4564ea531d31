/* The checks of one entry, gone through in C: see table.py, which writes the rows.

   What each row asks is what the line of Python asks that stands for it in the guard function's
   text; that text is the specification, and the tests compare the two.

   Registers hold new references: a row may run Python code, which may change any container. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#include "../native.h"

typedef struct {
    int op;
    Py_ssize_t a, b, n; /* registers, a number */
    PyObject *x, *y, *z;
    Py_ssize_t *registers; /* of rows that are about several */
    Py_ssize_t n_registers;
    const void **ids; /* a hash table of addresses */
    size_t n_ids; /* its size, a power of two, or 0 */
} Row;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *caught; /* a tuple of exceptions: a call that raises one isn't admitted */
    Py_ssize_t n_rows, n_registers, n_tensors;
    Row *rows;
} Table;

#define OPS(X)                                                                                     \
    X(call) X(quiet) X(cell) X(slot) X(items) X(members) X(context) X(arg) X(rest) X(keyword)      \
    X(type) X(is) X(equal) X(same) X(test) X(length) X(item) X(keys) X(has) X(get) X(attr)         \
    X(tensor) X(forms) X(distinct) X(others) X(python) X(give)

#define NAME(op) op_##op,
enum { OPS(NAME) N_OPS };
#define TEXT(op) #op,
static const char *const op_names[] = {OPS(TEXT)};

static PyObject *is_leaf_name, *is_same_name;

/* ---- What rows ask --------------------------------------------------------------------------- */

/* Each returns 1 where the call passes, 0 where it doesn't, -1 with an exception set. */

static int is_true(PyObject *found) {
    if (found == NULL) {
        return -1;
    }
    int result = PyObject_IsTrue(found);
    Py_DECREF(found);
    return result;
}

static int ask_call(const Row *row, PyObject *args, PyObject *kwargs) {
    Py_ssize_t n = PyTuple_GET_SIZE(row->x);
    if (PyTuple_GET_SIZE(args) != row->n || PyDict_GET_SIZE(kwargs) != n) {
        return 0;
    }
    Py_ssize_t position = 0, i = 0;
    PyObject *key;
    int result = 1;
    while (result == 1 && row->b && PyDict_Next(kwargs, &position, &key, NULL)) {
        result = PyObject_RichCompareBool(key, PyTuple_GET_ITEM(row->x, i++), Py_EQ);
    }
    for (i = 0; result == 1 && !row->b && i < n; i++) {
        result = PyDict_Contains(kwargs, PyTuple_GET_ITEM(row->x, i));
    }
    return result;
}

/* `x` says whether nothing was written; `y` holds a dict and a list that are empty while nobody
   doubts the entry, and what settles that. */
static int ask_quiet(const Row *row) {
    PyObject *is_quiet = Py_NewRef(row->x);
    int result = is_true(PyObject_CallNoArgs(is_quiet));
    Py_DECREF(is_quiet);
    if (result < 0) {
        return -1;
    }
    if (result && PyDict_GET_SIZE(PyTuple_GET_ITEM(row->y, 0)) == 0 &&
        PyList_GET_SIZE(PyTuple_GET_ITEM(row->y, 1)) == 0) {
        return 1;
    }
    return is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(row->y, 2)));
}

/* What a row compares with; a weak reference (b) stands for what it refers to. A borrowed reference,
   NULL where that is gone. */
static PyObject *kept_of(const Row *row) {
    if (!row->b) {
        return row->y;
    }
    PyObject *found = ((PyWeakReference *)row->y)->wr_object;
    return Py_IsNone(found) ? NULL : found;
}

/* `x` is a context variable, and what stands for no value. */
static int ask_context(const Row *row) {
    PyObject *found = NULL;
    if (PyContextVar_Get(PyTuple_GET_ITEM(row->x, 0), PyTuple_GET_ITEM(row->x, 1), &found) < 0) {
        return -1;
    }
    int result = found == kept_of(row);
    Py_XDECREF(found);
    return result;
}

static int ask_items(PyObject *list, PyObject *kept) {
    Py_ssize_t n = PyTuple_GET_SIZE(kept);
    if (PyList_GET_SIZE(list) != n) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyList_GET_ITEM(list, i), *one = PyTuple_GET_ITEM(kept, i);
        if (PyWeakref_CheckRef(one)) { /* a dead one refers to None */
            one = Py_IsNone(item) ? NULL : ((PyWeakReference *)one)->wr_object;
        }
        if (item != one) {
            return 0;
        }
    }
    return 1;
}

/* Strings and classes, in the order in which a set is walked through. */
static int ask_members(PyObject *owner, PyObject *members) {
    if (Py_IsNone(owner) || PySet_GET_SIZE(owner) != PyTuple_GET_SIZE(members)) {
        return 0;
    }
    PyObject *iterator = PySet_Type.tp_iter(owner), *item;
    int result = iterator == NULL ? -1 : 1;
    for (Py_ssize_t i = 0; result == 1 && (item = PyIter_Next(iterator)) != NULL; i++) {
        PyObject *member = PyTuple_GET_ITEM(members, i);
        result = item == member;
        if (!result && PyUnicode_CheckExact(item) && PyUnicode_CheckExact(member)) {
            result = PyUnicode_Compare(item, member) == 0;
        }
        Py_DECREF(item);
    }
    Py_XDECREF(iterator);
    return result;
}

/* What no sentry watches: a quick look at what it holds; `z` compares with care. */
static int ask_pulled(const Row *row) {
    int result = 0;
    PyObject *owner;
    switch (row->op) {
    case op_cell:
        owner = PyCell_GET(row->x);
        result = owner != NULL && owner == kept_of(row);
        break;
    case op_slot:
        owner = *(PyObject **)((char *)row->x + row->n);
        result = owner != NULL && owner == kept_of(row);
        break;
    case op_items: /* in a list, or in the one that a slot holds (b) */
        owner = row->b ? *(PyObject **)((char *)row->x + row->n) : row->x;
        result = owner != NULL && PyList_Check(owner) && ask_items(owner, row->y);
        break;
    case op_context:
        result = ask_context(row);
        break;
    default: /* op_members */
        owner = Py_NewRef(((PyWeakReference *)row->x)->wr_object);
        result = ask_members(owner, row->y);
        Py_DECREF(owner);
    }
    if (result != 0) {
        return result;
    }
    return is_true(PyObject_CallMethodNoArgs(row->z, is_same_name));
}

static int ask_equal(PyObject *found, PyObject *value) {
    if (found == value) {
        return 1;
    }
    return Py_TYPE(found) == Py_TYPE(value) ? PyObject_RichCompareBool(found, value, Py_EQ) : 0;
}

static int ask_length(const Row *row, PyObject *found) {
    if (PyList_Check(found) || PyTuple_Check(found)) {
        return Py_SIZE(found) == row->n;
    }
    PyErr_SetString(PyExc_TypeError, "neither a list nor a tuple");
    return -1;
}

static int ask_keys(const Row *row, PyObject *found) {
    Py_ssize_t position = 0, i = 0;
    PyObject *key;
    if (!PyDict_Check(found) || PyDict_GET_SIZE(found) != PyTuple_GET_SIZE(row->x)) {
        return 0;
    }
    while (PyDict_Next(found, &position, &key, NULL)) {
        PyObject *kept = PyTuple_GET_ITEM(row->x, i++);
        if (key != kept && !(PyUnicode_CheckExact(key) && PyUnicode_Compare(key, kept) == 0)) {
            if (PyErr_Occurred()) {
                return -1;
            }
            /* A subclass of str may say that it is equal. */
            Py_INCREF(key);
            int result = PyUnicode_CheckExact(key) ? 0 : PyObject_RichCompareBool(key, kept, Py_EQ);
            Py_DECREF(key);
            if (result != 1) {
                return result;
            }
        }
    }
    return 1;
}

/* Autograd refuses to say of some views: then the answer is no. */
static int ask_leaf(PyObject *found, int is_wanted) {
    PyObject *answer = PyObject_GetAttr(found, is_leaf_name);
    if (answer == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return !is_wanted;
    }
    int is_leaf = is_true(answer);
    return is_leaf < 0 ? -1 : is_leaf == is_wanted;
}

/* A tensor of an exact class, without attributes that the run may have looked for. `n` is 2 for a
   leaf that wants a gradient, 1 for another tensor that does. `z` is a getter, and what it must
   say: a tensor without strides must never come to op_forms, where the error of C++ would end the
   process. */
static int ask_tensor(const Row *row, PyObject *found) {
    if (Py_TYPE(found) != (PyTypeObject *)row->x) {
        return 0;
    }
    const PyGetSetDef *def = ((PyGetSetDescrObject *)PyTuple_GET_ITEM(row->z, 0))->d_getset;
    PyObject *answer = def->get(found, def->closure);
    Py_XDECREF(answer); /* True and False live on */
    if (answer != PyTuple_GET_ITEM(row->z, 1)) {
        return answer == NULL ? -1 : 0;
    }
    PyObject **place = _PyObject_GetDictPtr(found);
    if (place == NULL) {
        return 0;
    }
    Py_ssize_t position = 0;
    PyObject *key;
    while (*place != NULL && PyDict_Next(*place, &position, &key, NULL)) {
        int result = PySet_Contains(row->y, key);
        if (result != 0) {
            return result < 0 ? -1 : 0;
        }
    }
    return row->n == 0 ? 1 : ask_leaf(found, row->n == 2);
}

/* Where an address is in a hash table, or would be. The table is never full. */
static const void **find_id(const void **ids, size_t n_ids, const void *id) {
    size_t place = (size_t)((uint64_t)((uintptr_t)id >> 4) * 0x9E3779B97F4A7C15u >> 20);
    while (ids[place & (n_ids - 1)] != NULL && ids[place & (n_ids - 1)] != id) {
        place++;
    }
    return &ids[place & (n_ids - 1)];
}

static const void **build_ids(Py_ssize_t n, size_t *n_ids) {
    for (*n_ids = 4; *n_ids < 2 * (size_t)n;) {
        *n_ids *= 2;
    }
    const void **ids = PyMem_Calloc(*n_ids, sizeof *ids);
    if (ids == NULL) {
        PyErr_NoMemory();
    }
    return ids;
}

/* Whether all are different objects. */
static int ask_distinct(const Row *row, PyObject **registers) {
    Py_ssize_t n = row->n_registers;
    if (n <= 8) {
        for (Py_ssize_t i = 0; i < n; i++) {
            for (Py_ssize_t j = 0; j < i; j++) {
                if (registers[row->registers[i]] == registers[row->registers[j]]) {
                    return 0;
                }
            }
        }
        return 1;
    }
    size_t n_seen;
    const void **seen = build_ids(n, &n_seen);
    if (seen == NULL) {
        return -1;
    }
    int result = 1;
    for (Py_ssize_t i = 0; result && i < n; i++) {
        const void *id = registers[row->registers[i]], **place = find_id(seen, n_seen, id);
        result = *place == NULL;
        *place = id;
    }
    PyMem_Free((void *)seen);
    return result;
}

/* Whether none is one of the objects with these addresses. */
static int ask_others(const Row *row, PyObject **registers) {
    for (Py_ssize_t i = 0; i < row->n_registers; i++) {
        if (*find_id(row->ids, row->n_ids, registers[row->registers[i]]) != NULL) {
            return 0;
        }
    }
    return 1;
}

/* ---- What rows fetch ------------------------------------------------------------------------- */

/* A new reference; NULL with an exception set where there is nothing. */
static PyObject *fetch(const Row *row, PyObject *from, PyObject *args, PyObject *kwargs) {
    PyObject *found;
    switch (row->op) {
    case op_arg:
        if (row->n < PyTuple_GET_SIZE(args)) {
            return Py_NewRef(PyTuple_GET_ITEM(args, row->n));
        }
        PyErr_SetNone(PyExc_IndexError);
        return NULL;
    case op_rest:
        return PyTuple_GetSlice(args, row->n, PY_SSIZE_T_MAX);
    case op_item:
        if ((PyList_Check(from) || PyTuple_Check(from)) && row->n < Py_SIZE(from)) {
            return Py_NewRef(PyList_Check(from) ? PyList_GET_ITEM(from, row->n)
                                                : PyTuple_GET_ITEM(from, row->n));
        }
        PyErr_SetNone(PyExc_IndexError);
        return NULL;
    case op_attr:
        return PyObject_GetAttr(from, row->x);
    default: /* op_keyword, op_get */
        from = row->op == op_get ? from : kwargs;
        found = PyDict_Check(from) ? PyDict_GetItemWithError(from, row->x) : NULL;
        if (found == NULL && !PyErr_Occurred()) {
            PyErr_SetNone(PyExc_KeyError);
        }
        return Py_XNewRef(found);
    }
}

/* ---- The table ------------------------------------------------------------------------------- */

/* Lines that have no rows, as one function: None, or what they assign. */
static int run_python(const Row *row, PyObject **registers, PyObject *args, PyObject *kwargs) {
    PyObject *small[16], **given = small;
    Py_ssize_t n = 2 + row->n_registers;
    if (n > 16 && (given = PyMem_New(PyObject *, n)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    given[0] = args;
    given[1] = kwargs;
    for (Py_ssize_t i = 0; i < row->n_registers; i++) {
        given[2 + i] = registers[row->registers[i]];
    }
    PyObject *found = PyObject_Vectorcall(row->x, given, (size_t)n, NULL);
    if (given != small) {
        PyMem_Free(given);
    }
    if (found == NULL || Py_IsNone(found)) {
        Py_XDECREF(found);
        return found == NULL ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(found); i++) {
        Py_XSETREF(registers[row->b + i], Py_NewRef(PyTuple_GET_ITEM(found, i)));
    }
    Py_DECREF(found);
    return 1;
}

static int run_row(Table *self, const Row *row, PyObject **registers, Py_ssize_t *n_tensors,
                   PyObject *args, PyObject *kwargs) {
    PyObject *found;
    switch (row->op) {
    case op_call:
        return ask_call(row, args, kwargs);
    case op_quiet:
        return ask_quiet(row);
    case op_cell:
    case op_slot:
    case op_items:
    case op_members:
    case op_context:
        return ask_pulled(row);
    case op_arg:
    case op_rest:
    case op_keyword:
    case op_item:
    case op_get:
    case op_attr:
        found = fetch(row, registers[row->b], args, kwargs);
        Py_XSETREF(registers[row->a], found);
        return found == NULL ? -1 : 1;
    case op_type:
        return Py_TYPE(registers[row->a]) == (PyTypeObject *)row->x;
    case op_is:
        return registers[row->a] == row->x;
    case op_equal:
        return ask_equal(registers[row->a], row->x);
    case op_same:
        return registers[row->a] == registers[row->registers[0]];
    case op_test:
        return is_true(PyObject_CallOneArg(row->x, registers[row->a]));
    case op_length:
        return ask_length(row, registers[row->a]);
    case op_keys:
        return ask_keys(row, registers[row->a]);
    case op_has:
        if (!PyDict_Check(registers[row->a])) {
            return 0;
        }
        int has = PyDict_Contains(registers[row->a], row->x);
        return has < 0 ? -1 : has == row->n;
    case op_tensor:
        registers[self->n_registers + (*n_tensors)++] = registers[row->a];
        return ask_tensor(row, registers[row->a]);
    case op_forms:
        return is_true(PyObject_Vectorcall(row->x, registers + self->n_registers,
                                           (size_t)*n_tensors, NULL));
    case op_distinct:
        return ask_distinct(row, registers);
    case op_others:
        return ask_others(row, registers);
    case op_python:
        return run_python(row, registers, args, kwargs);
    default:
        PyErr_SetString(PyExc_SystemError, "unknown row");
        return -1;
    }
}

static PyObject *give(const Row *row, PyObject **registers) {
    PyObject *given = PyTuple_New(row->n_registers);
    for (Py_ssize_t i = 0; given != NULL && i < row->n_registers; i++) {
        PyTuple_SET_ITEM(given, i, Py_NewRef(registers[row->registers[i]]));
    }
    return given;
}

/* Called with a call's tuple and dict: what the graph gets of them, or None. */
static PyObject *run(PyObject *callable, PyObject *const *given, size_t n, PyObject *names) {
    Table *self = (Table *)callable;
    if (PyVectorcall_NARGS(n) != 2 || names != NULL || !PyTuple_Check(given[0]) ||
        !PyDict_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "a table takes a tuple and a dict");
        return NULL;
    }
    PyObject *small[32] = {NULL}, **registers = small, *result = NULL;
    Py_ssize_t size = self->n_registers + self->n_tensors, n_tensors = 0;
    if (size > 32 && (registers = PyMem_Calloc((size_t)size, sizeof *registers)) == NULL) {
        return PyErr_NoMemory();
    }
    int passes = 1;
    for (Py_ssize_t i = 0; passes == 1 && i < self->n_rows; i++) {
        const Row *row = &self->rows[i];
        if (row->op == op_give) {
            result = give(row, registers);
            passes = result == NULL ? -1 : 0;
        }
        else {
            passes = run_row(self, row, registers, &n_tensors, given[0], given[1]);
        }
    }
    if (passes < 0 && PyErr_ExceptionMatches(self->caught)) {
        PyErr_Clear();
        passes = 0;
    }
    for (Py_ssize_t i = 0; i < self->n_registers; i++) {
        Py_XDECREF(registers[i]);
    }
    if (registers != small) {
        PyMem_Free(registers);
    }
    return passes < 0 ? NULL : result == NULL ? Py_NewRef(Py_None) : result;
}

/* ---- Making one ------------------------------------------------------------------------------ */

static Py_ssize_t *read_numbers(PyObject *numbers, Py_ssize_t *n) {
    *n = PyTuple_GET_SIZE(numbers);
    Py_ssize_t *read = PyMem_Calloc((size_t)*n, sizeof *read);
    if (read == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *n; i++) {
        read[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(numbers, i));
    }
    return read;
}

static const void **read_ids(PyObject *numbers, size_t *n_ids) {
    const void **ids = build_ids(PyTuple_GET_SIZE(numbers), n_ids);
    for (Py_ssize_t i = 0; ids != NULL && i < PyTuple_GET_SIZE(numbers); i++) {
        const void *id = PyLong_AsVoidPtr(PyTuple_GET_ITEM(numbers, i));
        *find_id(ids, *n_ids, id) = id;
    }
    return ids;
}

static int find_op(const char *name) {
    for (int op = 0; op < N_OPS; op++) {
        if (strcmp(op_names[op], name) == 0) {
            return op;
        }
    }
    PyErr_Format(PyExc_ValueError, "no row is called %s", name);
    return -1;
}

/* (name, a, b, n, x, y, z, registers, ids) */
static int read_row(Row *row, PyObject *item) {
    const char *name;
    PyObject *x, *y, *z, *registers, *ids;
    if (!PyArg_ParseTuple(item, "snnnOOOO!O!", &name, &row->a, &row->b, &row->n, &x, &y, &z,
                          &PyTuple_Type, &registers, &PyTuple_Type, &ids)) {
        return -1;
    }
    row->x = Py_NewRef(x);
    row->y = Py_NewRef(y);
    row->z = Py_NewRef(z);
    row->op = find_op(name);
    if (row->op < 0) {
        return -1;
    }
    if (row->op == op_tensor && !(PyTuple_Check(z) && PyTuple_GET_SIZE(z) == 2 &&
                                  Py_IS_TYPE(PyTuple_GET_ITEM(z, 0), &PyGetSetDescr_Type))) {
        PyErr_SetString(PyExc_TypeError, "a tensor is asked by a getter");
        return -1;
    }
    if (row->op == op_slot || (row->op == op_items && row->b)) { /* y is (descriptor, kept) */
        PyObject *descriptor = PyTuple_GetItem(y, 0), *kept = PyTuple_GetItem(y, 1);
        if (descriptor == NULL || kept == NULL || !Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
            PyErr_SetString(PyExc_TypeError, "a slot has a descriptor");
            return -1;
        }
        row->n = ((PyMemberDescrObject *)descriptor)->d_member->offset;
        Py_SETREF(row->y, Py_NewRef(kept));
    }
    row->registers = read_numbers(registers, &row->n_registers);
    if (PyTuple_GET_SIZE(ids) > 0) {
        row->ids = read_ids(ids, &row->n_ids);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *rows, *caught;
    Py_ssize_t n_registers;
    if (!PyArg_ParseTuple(args, "O!nO!", &PyTuple_Type, &rows, &n_registers, &PyTuple_Type,
                          &caught)) {
        return NULL;
    }
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = run;
    self->caught = Py_NewRef(caught);
    self->n_registers = n_registers;
    self->rows = PyMem_Calloc((size_t)PyTuple_GET_SIZE(rows), sizeof(Row));
    if (self->rows == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); i++) {
        self->n_rows = i + 1; /* what is half read is freed */
        if (read_row(&self->rows[i], PyTuple_GET_ITEM(rows, i)) < 0) {
            Py_DECREF(self);
            return NULL;
        }
        self->n_tensors += self->rows[i].op == op_tensor;
    }
    return (PyObject *)self;
}

static PyObject *ask(Table *self, PyObject *is_quiet) {
    for (Py_ssize_t i = 0; i < self->n_rows; i++) {
        if (self->rows[i].op == op_quiet) {
            Py_SETREF(self->rows[i].x, Py_NewRef(is_quiet));
        }
    }
    Py_RETURN_NONE;
}

static int table_traverse(Table *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->caught);
    for (Py_ssize_t i = 0; i < self->n_rows; i++) {
        Py_VISIT(self->rows[i].x);
        Py_VISIT(self->rows[i].y);
        Py_VISIT(self->rows[i].z);
    }
    return 0;
}

/* Whoever calls it holds it: it isn't cleared in the midst of a call. */
static int table_clear(Table *self) {
    Py_ssize_t n = self->n_rows;
    self->n_rows = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Row *row = &self->rows[i];
        Py_CLEAR(row->x);
        Py_CLEAR(row->y);
        Py_CLEAR(row->z);
        PyMem_Free(row->registers);
        PyMem_Free((void *)row->ids);
        row->registers = NULL;
        row->ids = NULL;
    }
    Py_CLEAR(self->caught);
    return 0;
}

static void table_dealloc(Table *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    table_clear(self);
    PyMem_Free(self->rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *swap_others(Table *self, PyObject *ids) {
    if (!PyTuple_Check(ids)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of addresses is needed");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < self->n_rows; i++) {
        Row *row = &self->rows[i];
        if (row->op == op_others) {
            size_t n_ids;
            const void **now = read_ids(ids, &n_ids), **before = row->ids;
            if (now == NULL || PyErr_Occurred()) {
                PyMem_Free((void *)now);
                return NULL;
            }
            row->ids = now;
            row->n_ids = n_ids;
            PyMem_Free((void *)before);
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef table_methods[] = {
    {"ask", (PyCFunction)ask, METH_O, "Ask this sentry from now on."},
    {"swap_others", (PyCFunction)swap_others, METH_O,
     "Compare with the objects at these addresses from now on."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef table_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Table, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_doc, "The checks of one entry; see table.py."},
    {Py_tp_new, table_new},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_clear},
    {Py_tp_methods, table_methods},
    {Py_tp_members, table_members},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "tripwire.validity._table.Table",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = table_slots,
};

static int module_exec(PyObject *module) {
    is_leaf_name = PyUnicode_InternFromString("is_leaf");
    is_same_name = PyUnicode_InternFromString("is_same");
    if (is_leaf_name == NULL || is_same_name == NULL) {
        return -1;
    }
    return add_type(module, &table_spec);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    LAST_SLOTS,
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_table",
    .m_doc = "Tables of checks; see table.py.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__table(void) {
    return PyModuleDef_Init(&module_def);
}
