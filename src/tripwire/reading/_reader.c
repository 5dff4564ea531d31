/* The reader of reader.py: told of attribute reads as they happen.

   While any reader is at work, `tp_getattro` of the classes that it met leads through
   read_attribute(), which calls the original and notes (object, name) for the reader of the thread
   that reads. Other threads pass through. Specialised bytecode trusts a class's version, so a class
   gets a new one when it is hooked; none is needed afterwards, since nothing is specialised for a
   class with a `tp_getattro` of its own.

   Of a class that is watched every lookup passes here that can find something in it: of its objects,
   met or not, of itself (its metaclass is hooked, `type` among them), and through `super`. Of these
   the names alone are noted, whoever asked and whatever came of it.

   Invariants:
   - Classes in the table are kept alive by it; the last reader to stop empties it.
   - A reader's objects are kept alive by whoever met them, as long as the reader.
   - Whatever may run Python code (the original, the callback, a decref) may change every table
     here: nothing that points into one is used after it. */

#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE 1 /* for find_code() alone */
#include <Python.h>
#if PY_VERSION_HEX < 0x030C0000
#include <internal/pycore_frame.h>
#endif
#undef Py_BUILD_CORE
#include <stdint.h>
#include <string.h>

#include "../native.h"

/* ---- Tables: address -> position ------------------------------------------------------------- */

typedef struct {
    const void *address; /* NULL: a free place */
    Py_ssize_t position;
} Slot;

typedef struct {
    Slot *slots;
    size_t n_slots; /* a power of two, or 0; at most half are taken */
    size_t n_taken;
} Table;

static Slot *find_slot(const Table *table, const void *address) {
    uint64_t mixed = ((uint64_t)(uintptr_t)address >> 4) * 0x9E3779B97F4A7C15u;
    size_t at = (mixed >> 32) & (table->n_slots - 1);
    while (table->slots[at].address != NULL && table->slots[at].address != address) {
        at = (at + 1) & (table->n_slots - 1);
    }
    return &table->slots[at];
}

static Py_ssize_t find(const Table *table, const void *address) {
    if (table->n_taken == 0) {
        return -1;
    }
    const Slot *slot = find_slot(table, address);
    return slot->address == NULL ? -1 : slot->position;
}

static int add(Table *table, const void *address, Py_ssize_t position) {
    if (2 * (table->n_taken + 1) > table->n_slots) {
        Table larger = {NULL, table->n_slots ? 2 * table->n_slots : 64, table->n_taken};
        larger.slots = PyMem_Calloc(larger.n_slots, sizeof(Slot));
        if (larger.slots == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (size_t i = 0; i < table->n_slots; i++) {
            if (table->slots[i].address != NULL) {
                *find_slot(&larger, table->slots[i].address) = table->slots[i];
            }
        }
        PyMem_Free(table->slots);
        *table = larger;
    }
    *find_slot(table, address) = (Slot){address, position};
    table->n_taken++;
    return 0;
}

static void clear(Table *table) {
    PyMem_Free(table->slots);
    *table = (Table){NULL, 0, 0};
}

/* Room for one more in an array that doubles. */
static void *make_room(void *array, Py_ssize_t n, Py_ssize_t *room, size_t size) {
    if (n < *room) {
        return array;
    }
    Py_ssize_t more = *room ? 2 * *room : 8;
    void *larger = PyMem_Realloc(array, (size_t)more * size);
    if (larger == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *room = more;
    return larger;
}

/* ---- Classes --------------------------------------------------------------------------------- */

typedef struct {
    PyTypeObject *cls;
    getattrofunc original;
} Hooked;

static Table class_table;
static Hooked *classes;
static Py_ssize_t n_classes, room_for_classes;
static int n_readers; /* at work, in all threads */

static PyObject *read_attribute(PyObject *object, PyObject *name);

/* What to call for an object of a class. A class that isn't in the table has our function if it
   copied a base's slot, or if a read is still going on after the last reader stopped. */
static getattrofunc find_original(PyTypeObject *cls) {
    for (; cls != NULL; cls = cls->tp_base) {
        Py_ssize_t at = find(&class_table, cls);
        if (at >= 0) {
            return classes[at].original;
        }
        if (cls->tp_getattro != read_attribute) {
            return cls->tp_getattro;
        }
    }
    return PyObject_GenericGetAttr;
}

static int hook_class(PyTypeObject *cls) {
    if (find(&class_table, cls) >= 0) {
        return 0;
    }
    getattrofunc original = find_original(cls);
    Hooked *found = make_room(classes, n_classes, &room_for_classes, sizeof(Hooked));
    if (found == NULL) {
        return -1;
    }
    classes = found;
    if (add(&class_table, cls, n_classes) < 0) {
        return -1;
    }
    classes[n_classes++] = (Hooked){(PyTypeObject *)Py_NewRef(cls), original};
    cls->tp_getattro = read_attribute;
    PyType_Modified(cls);
    return 0;
}

/* `type` and `super` have functions of their own: C code calls `PyType_Type.tp_getattro` for objects
   of other metaclasses, pybind11's among them. No bytecode is specialised for objects of these. */
static getattrofunc of_type, of_super; /* the originals; NULL where they aren't hooked */
static PyObject *read_of_type(PyObject *object, PyObject *name);
static PyObject *read_of_super(PyObject *object, PyObject *name);

static int hook_watched(PyTypeObject *cls) {
    if (of_type == NULL) {
        of_type = PyType_Type.tp_getattro;
        of_super = PySuper_Type.tp_getattro;
        PyType_Type.tp_getattro = read_of_type;
        PySuper_Type.tp_getattro = read_of_super;
    }
    if (hook_class(cls) < 0) {
        return -1;
    }
    return Py_IS_TYPE(cls, &PyType_Type) ? 0 : hook_class(Py_TYPE(cls));
}

static void let_go_of_classes(void) {
    Hooked *hooked = classes;
    Py_ssize_t n = n_classes;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (hooked[i].cls->tp_getattro == read_attribute) {
            hooked[i].cls->tp_getattro = hooked[i].original;
        }
    }
    classes = NULL;
    n_classes = room_for_classes = 0;
    clear(&class_table);
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_DECREF(hooked[i].cls);
    }
    PyMem_Free(hooked);
    if (of_type != NULL) {
        PyType_Type.tp_getattro = of_type;
        PySuper_Type.tp_getattro = of_super;
        of_type = of_super = NULL;
    }
}

/* ---- Readers --------------------------------------------------------------------------------- */

/* One name under which an object was read. */
typedef struct {
    PyObject *name;
    PyObject *first; /* what was found first, if it was a plain value; else NULL */
} Read;

/* An object, and how it was read. */
typedef struct {
    PyObject *object;
    Read *reads;
    Py_ssize_t n_reads, room;
} Met;

typedef struct Reader {
    PyObject_HEAD
    PyObject *on_read;
    PyObject *accessors; /* code objects that read `__dict__` to find one name in it */
    PyObject *tables; /* names under which an empty dict is noted and not told */
    PyObject *own_folder; /* code in files below it is tripwire's */
    PyObject *go_betweens; /* code of tripwire's that reads for its caller */
    PyObject *on_name;
    PyObject *waiting; /* a dict: on_name is told of names that are keys of it */
    PyObject *watched; /* a list of classes; NULL once closed */
    PyObject *names; /* a set: under which anything was asked for that a class could hold */
    Table table;
    Met *met;
    Py_ssize_t n_met, room;
    struct Reader *outer; /* of this thread; NULL where there is none */
    char is_working;
    char is_busy; /* its callback runs */
    char has_lost; /* a hooked class got another slot: reads may have gone unseen */
} Reader;

static THREAD_LOCAL Reader *current;
static PyObject *dict_name; /* "__dict__" */

/* The code that runs, borrowed: its frame keeps it. NULL outside of any. */
static PyCodeObject *find_code(void) {
#if PY_VERSION_HEX >= 0x030C0000
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) {
        return NULL;
    }
    PyCodeObject *code = PyFrame_GetCode(frame);
    Py_DECREF(code);
    return code;
#else
    struct _PyInterpreterFrame *frame = PyThreadState_Get()->cframe->current_frame;
    while (frame != NULL && _PyFrame_IsIncomplete(frame)) {
        frame = frame->previous;
    }
    return frame == NULL ? NULL : frame->f_code;
#endif
}

static int is_own(const Reader *self, const PyCodeObject *code) {
    if (!PyUnicode_Check(code->co_filename)) {
        return 0;
    }
    Py_ssize_t n = PyUnicode_GET_LENGTH(self->own_folder);
    return PyUnicode_Tailmatch(code->co_filename, self->own_folder, 0, n, -1) == 1;
}

/* Values of which nothing more can be read. */
static int is_leaf(PyObject *value) {
    return value == NULL || value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
           PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value);
}

static int tell(Reader *self, PyObject *whom, PyObject *a, PyObject *b, PyObject *c) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Py_INCREF(self);
    Py_INCREF(whom);
    self->is_busy = 1;
    PyObject *result = PyObject_CallFunctionObjArgs(whom, a, b, c, NULL);
    self->is_busy = 0;
    Py_DECREF(whom);
    Py_DECREF(self);
    if (result == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
        return -1;
    }
    Py_DECREF(result);
    PyErr_Restore(type, error, trace);
    return 0;
}

/* A read is noted once for each object and name. -1 with an exception where telling failed. */
static int note(Reader *self, PyObject *object, PyObject *name, PyObject *value) {
    Py_ssize_t at = find(&self->table, object);
    if (at < 0) {
        return 0;
    }
    Met *met = &self->met[at];
    for (Py_ssize_t i = 0; i < met->n_reads; i++) {
        if (met->reads[i].name == name) {
            return 0;
        }
    }
    PyCodeObject *code = find_code();
    if (code != NULL) {
        if (is_own(self, code)) {
            int found = PySequence_Contains(self->go_betweens, (PyObject *)code);
            if (found <= 0) {
                return found;
            }
            met = &self->met[at];
        }
        if (PyUnicode_Compare(name, dict_name) == 0) {
            int found = PySequence_Contains(self->accessors, (PyObject *)code);
            if (found != 0) {
                return found < 0 ? -1 : 0;
            }
            met = &self->met[at];
        }
    }
    if (!PyUnicode_CHECK_INTERNED(name)) { /* a computed name: an equal one may be there */
        PyObject *interned = Py_NewRef(name);
        PyUnicode_InternInPlace(&interned);
        int result = interned == name ? 1 : note(self, object, interned, value);
        Py_DECREF(interned);
        if (result <= 0) {
            return result;
        }
    }
    Read *reads = make_room(met->reads, met->n_reads, &met->room, sizeof(Read));
    if (reads == NULL) {
        return -1;
    }
    int is_plain = is_leaf(value);
    met->reads = reads;
    met->reads[met->n_reads++] = (Read){Py_NewRef(name), is_plain ? Py_XNewRef(value) : NULL};
    if (is_plain) {
        return 0;
    }
    if (PyDict_Check(value) && PyDict_GET_SIZE(value) == 0) {
        int found = PySet_Contains(self->tables, name);
        if (found != 0) {
            return found < 0 ? -1 : 0;
        }
    }
    return tell(self, self->on_read, object, name, value);
}

/* A name is looked up, by whoever and with whatever outcome. */
static int note_name(PyObject *name) {
    if (!PyUnicode_CheckExact(name)) { /* the lookup itself will say what is wrong with it */
        if (!PyUnicode_Check(name)) {
            return 0;
        }
        PyObject *exact = PyUnicode_FromObject(name);
        int result = exact == NULL ? -1 : note_name(exact);
        Py_XDECREF(exact);
        return result;
    }
    Reader *reader = current;
    Py_ssize_t n = PySet_GET_SIZE(reader->names);
    for (Reader *at = reader; at != NULL; at = at->outer) {
        if (PySet_Add(at->names, name) < 0) {
            return -1;
        }
    }
    if (n == PySet_GET_SIZE(reader->names) || reader->on_name == NULL) {
        return 0;
    }
    int found = PyDict_Contains(reader->waiting, name);
    return found <= 0 ? found : tell(reader, reader->on_name, name, NULL, NULL);
}

static PyObject *read_attribute(PyObject *object, PyObject *name) {
    PyTypeObject *cls = Py_TYPE(object);
    getattrofunc original = find_original(cls);
    Reader *reader = current;
    if (reader == NULL || reader->is_busy || reader->on_read == NULL) {
        if (n_readers == 0 && cls->tp_getattro == read_attribute) {
            cls->tp_getattro = original; /* a copy of a base's slot, left over */
        }
        return original(object, name);
    }
    if (note_name(name) < 0) {
        return NULL;
    }
    Py_INCREF(reader);
    PyObject *value = original(object, name);
    if (cls->tp_getattro != read_attribute) {
        /* slot_tp_getattr_hook() puts a simpler function in its place, once. */
        Py_ssize_t at = find(&class_table, cls);
        if (at >= 0) {
            classes[at].original = cls->tp_getattro;
            cls->tp_getattro = read_attribute;
        }
    }
    if (reader == current && !reader->is_busy && reader->on_read != NULL && PyUnicode_Check(name) &&
        (value != NULL || PyErr_ExceptionMatches(PyExc_AttributeError))) {
        if (note(reader, object, name, value) < 0) {
            Py_CLEAR(value);
        }
    }
    Py_DECREF(reader);
    return value;
}

/* A metaclass that is made meanwhile copies the slot, and keeps it. */
static PyObject *read_of_type(PyObject *object, PyObject *name) {
    getattrofunc original = of_type != NULL ? of_type : PyType_Type.tp_getattro;
    if (current != NULL && !current->is_busy && note_name(name) < 0) {
        return NULL;
    }
    if (n_readers == 0 && Py_TYPE(object)->tp_getattro == read_of_type) {
        Py_TYPE(object)->tp_getattro = original;
    }
    return original(object, name);
}

static PyObject *read_of_super(PyObject *object, PyObject *name) {
    getattrofunc original = of_super != NULL ? of_super : PySuper_Type.tp_getattro;
    if (current != NULL && !current->is_busy && note_name(name) < 0) {
        return NULL;
    }
    return original(object, name);
}

static void forget_objects(Reader *self) {
    Met *met = self->met;
    Py_ssize_t n = self->n_met;
    self->met = NULL;
    self->n_met = self->room = 0;
    clear(&self->table);
    for (Py_ssize_t i = 0; i < n; i++) {
        for (Py_ssize_t j = 0; j < met[i].n_reads; j++) {
            Py_DECREF(met[i].reads[j].name);
            Py_XDECREF(met[i].reads[j].first);
        }
        PyMem_Free(met[i].reads);
    }
    PyMem_Free(met);
}

static void look_for_lost(Reader *self) {
    for (Py_ssize_t i = 0; i < n_classes; i++) {
        if (classes[i].cls->tp_getattro != read_attribute) {
            self->has_lost = 1;
        }
    }
}

static void stop_working(Reader *self) {
    if (!self->is_working) {
        return;
    }
    look_for_lost(self);
    self->is_working = 0;
    for (Reader **at = &current; *at != NULL; at = &(*at)->outer) {
        if (*at == self) {
            *at = self->outer;
            break;
        }
    }
    self->outer = NULL;
    if (--n_readers == 0) {
        let_go_of_classes();
    }
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"on_read", "own_folder", "go_betweens", "accessors",
                            "tables",  "on_name",    "waiting",     NULL};
    PyObject *on_read, *own_folder, *go_betweens, *accessors, *tables, *on_name, *waiting;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUO!O!O!OO!", names, &on_read, &own_folder,
                                     &PyTuple_Type, &go_betweens, &PyTuple_Type, &accessors,
                                     &PyFrozenSet_Type, &tables, &on_name, &PyDict_Type,
                                     &waiting)) {
        return NULL;
    }
    Reader *self = (Reader *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->watched = PyList_New(0);
        self->names = PySet_New(NULL);
        if (self->watched == NULL || self->names == NULL) {
            Py_DECREF(self);
            return NULL;
        }
        self->on_read = Py_NewRef(on_read);
        self->own_folder = Py_NewRef(own_folder);
        self->go_betweens = Py_NewRef(go_betweens);
        self->accessors = Py_NewRef(accessors);
        self->tables = Py_NewRef(tables);
        self->on_name = Py_NewRef(on_name);
        self->waiting = Py_NewRef(waiting);
    }
    return (PyObject *)self;
}

static PyObject *reader_start(Reader *self, PyObject *Py_UNUSED(none)) {
    if (!self->is_working) {
        self->is_working = 1;
        self->outer = current;
        current = self;
        n_readers++;
        for (Py_ssize_t i = 0; i < self->n_met; i++) {
            if (hook_class(Py_TYPE(self->met[i].object)) < 0) {
                return NULL;
            }
        }
        for (Py_ssize_t i = 0; self->watched && i < PyList_GET_SIZE(self->watched); i++) {
            if (hook_watched((PyTypeObject *)PyList_GET_ITEM(self->watched, i)) < 0) {
                return NULL;
            }
        }
    }
    Py_RETURN_NONE;
}

static PyObject *reader_stop(Reader *self, PyObject *Py_UNUSED(none)) {
    stop_working(self);
    Py_RETURN_NONE;
}

static PyObject *reader_meet(Reader *self, PyObject *object) {
    if (find(&self->table, object) < 0) {
        Met *met = make_room(self->met, self->n_met, &self->room, sizeof(Met));
        if (met == NULL) {
            return NULL;
        }
        self->met = met;
        if (add(&self->table, object, self->n_met) < 0) {
            return NULL;
        }
        self->met[self->n_met++] = (Met){object, NULL, 0, 0};
    }
    if (self->is_working && hook_class(Py_TYPE(object)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *reader_watch(Reader *self, PyObject *cls) {
    if (!PyType_Check(cls)) {
        PyErr_SetString(PyExc_TypeError, "watch() takes a class");
        return NULL;
    }
    if (self->watched == NULL) {
        Py_RETURN_NONE;
    }
    if (PyList_Append(self->watched, cls) < 0 || (self->is_working && hook_watched((PyTypeObject *)cls) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *reader_names_of(Reader *self, PyObject *object) {
    Py_ssize_t at = find(&self->table, object);
    PyObject *names = PyTuple_New(at < 0 ? 0 : self->met[at].n_reads);
    for (Py_ssize_t i = 0; names != NULL && at >= 0 && i < self->met[at].n_reads; i++) {
        PyTuple_SET_ITEM(names, i, Py_NewRef(self->met[at].reads[i].name));
    }
    if (names == NULL) {
        return NULL;
    }
    PyObject *found = PyFrozenSet_New(names);
    Py_DECREF(names);
    return found;
}

static PyObject *reader_first_of(Reader *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "first_of() takes an object, a name and a default");
        return NULL;
    }
    Py_ssize_t at = find(&self->table, args[0]);
    for (Py_ssize_t i = 0; at >= 0 && i < self->met[at].n_reads; i++) {
        Read read = self->met[at].reads[i];
        if (read.first != NULL && PyUnicode_Compare(read.name, args[1]) == 0) {
            return Py_NewRef(read.first);
        }
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(args[2]);
}

static void forget_listeners(Reader *self) {
    Py_CLEAR(self->on_read);
    Py_CLEAR(self->on_name);
    Py_CLEAR(self->watched);
}

static PyObject *reader_close(Reader *self, PyObject *Py_UNUSED(none)) {
    stop_working(self);
    forget_listeners(self);
    Py_RETURN_NONE;
}

static PyObject *has_lost_sight(PyObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(((Reader *)self)->has_lost);
}

static PyObject *names_looked_up(PyObject *self, void *Py_UNUSED(closure)) {
    return PyFrozenSet_New(((Reader *)self)->names);
}

static int reader_traverse(Reader *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->on_read);
    Py_VISIT(self->on_name);
    Py_VISIT(self->waiting);
    Py_VISIT(self->watched);
    return 0;
}

static int reader_clear(Reader *self) {
    stop_working(self);
    forget_listeners(self);
    Py_CLEAR(self->waiting);
    return 0;
}

static void reader_dealloc(Reader *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    reader_clear(self);
    forget_objects(self);
    Py_CLEAR(self->own_folder);
    Py_CLEAR(self->go_betweens);
    Py_CLEAR(self->accessors);
    Py_CLEAR(self->tables);
    Py_CLEAR(self->names);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef reader_methods[] = {
    {"start", (PyCFunction)reader_start, METH_NOARGS, NULL},
    {"stop", (PyCFunction)reader_stop, METH_NOARGS, NULL},
    {"meet", (PyCFunction)reader_meet, METH_O, NULL},
    {"watch", (PyCFunction)reader_watch, METH_O, NULL},
    {"names_of", (PyCFunction)reader_names_of, METH_O, NULL},
    {"first_of", (PyCFunction)(void (*)(void))reader_first_of, METH_FASTCALL, NULL},
    {"close", (PyCFunction)reader_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reader_getset[] = {
    {"has_lost_sight", has_lost_sight, NULL, NULL, NULL},
    {"names_looked_up", names_looked_up, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_clear, reader_clear},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, reader_getset},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "tripwire.reading._reader.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = reader_slots,
};

/* ---- The module ------------------------------------------------------------------------------ */

/* In a forked child the readers of other threads are gone. */
static PyObject *after_fork(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    n_readers = 0;
    for (Reader *reader = current; reader != NULL; reader = reader->outer) {
        n_readers++;
    }
    if (n_readers == 0) {
        let_go_of_classes();
    }
    Py_RETURN_NONE;
}

static PyObject *count_hooked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return PyLong_FromSsize_t(n_classes + 2 * (of_type != NULL));
}

/* swap(get, put, expected, value): put a value where another one lies, if it does; whether it did.
   Both are C functions, so no other thread runs in between. */
static PyObject *swap(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "swap takes four arguments");
        return NULL;
    }
    PyObject *found = PyObject_CallNoArgs(args[0]);
    if (found == NULL) {
        PyErr_Clear(); /* nothing lies there any more */
        Py_RETURN_FALSE;
    }
    int is_there = found == args[2];
    Py_DECREF(found);
    if (is_there) {
        PyObject *none = PyObject_CallOneArg(args[1], args[3]);
        if (none == NULL) {
            return NULL;
        }
        Py_DECREF(none);
    }
    return PyBool_FromLong(is_there);
}

static PyMethodDef module_methods[] = {
    {"swap", (PyCFunction)(void (*)(void))swap, METH_FASTCALL, NULL},
    {"after_fork", after_fork, METH_NOARGS, NULL},
    {"count_hooked", count_hooked, METH_NOARGS, "How many classes are hooked now."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    if (dict_name == NULL && (dict_name = PyUnicode_InternFromString("__dict__")) == NULL) {
        return -1;
    }
    return add_type(module, &reader_spec);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    LAST_SLOTS,
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_reader",
    .m_doc = "The reader in C; reader.py specifies it.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__reader(void) {
    return PyModuleDef_Init(&module_def);
}
