/* Calls of `float` and `int`, of some functions that C has (`math.exp`, `min`), of functions behind
   lru_cache, items of lists and tuples, and what containers hold, answered by the run: see casts.py.

   While any thread wants that, the two classes are called through cast(). It asks the answering
   function of the calling thread about one argument of the classes that were named, and makes the
   plain call where there is no such function, or where it gives NotImplemented. The classes stay the
   objects that they are; who calls them from C gets an answer, too.

   A function behind lru_cache keeps a single int as it is, and anything else in a tuple: an open number
   would find nothing of what a plain one left there. remember() asks for the arguments to use. It also
   asks which memo is to answer where an argument is a tensor: see memos.py.

   A list takes the value of an index and gives what is there, as do tuples and NumPy's arrays. find_item()
   asks what to give first.

   A set or a dict takes the hash of what it is asked for, and a list compares it with each element. contains()
   asks first whether it is there, for `n in container`, and get_item() for `d.get(n, default)`. A class that is made
   meanwhile inherits contains(), and keeps it.

   Python's random generators have one C function for all floats and one for all ints. Both are asked for
   through their method definitions, which every way to call them goes through.

   The methods of `int` and `float` (`int.bit_length`, `float.__add__`), which C takes out of the classes, compare the
   class of their first argument with their own. The methods that have a name of their own are called through
   call_method(); those that stand for operators all go through call_operator().

   Torch's classes of tensors (`torch.Tensor([1.0])`, `torch.LongTensor(3)`) are called through make(), which
   asks the making function of the calling thread. It takes part in the calls of their two metaclasses: CPython
   compares a class's own pointer (tp_new) with its bases' where a subclass calls super().__new__().

   The functions are called through call_function(), whoever imported them under whatever name. Bytecode
   that was specialised for one compares its flags, and lets go of it: a flag is added that means nothing
   to a function which exists already. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../native.h"

static vectorcallfunc plain_float, plain_int; /* NULL: CPython 3.11 has no such way for `int` */
static int n_answering; /* threads */
static THREAD_LOCAL PyObject *answer;  /* a function of the class and the argument, or NULL */
static THREAD_LOCAL PyObject *classes; /* a tuple: of which arguments it is asked */
static THREAD_LOCAL PyObject *closing; /* a function of a call's arguments: with which to make it */
static PyTypeObject *memo_type;        /* functools._lru_cache_wrapper */
static ternaryfunc plain_memo;
static THREAD_LOCAL PyObject *remembering; /* a function of a memo and a call's arguments: which answers */
static THREAD_LOCAL PyObject *remembered;  /* a set: identities of memos that answered as ever */
static PyTypeObject *key_type;             /* of an argument about which it is asked */
static int n_remembering, n_of_memos;      /* threads; and how often memo_type has our function */
static THREAD_LOCAL PyObject *picking; /* a function of a list or tuple and an index */
static binaryfunc plain_list_item, plain_tuple_item, plain_array_item;
static PyTypeObject *array_type; /* numpy.ndarray, or NULL */
static THREAD_LOCAL PyObject *containing; /* a function of a container and what it may hold */
static PyTypeObject *containers[] = {
    &PyDict_Type, &PySet_Type, &PyFrozenSet_Type, &PyList_Type, &PyTuple_Type, &PyRange_Type,
    NULL, /* defaultdict, which shares dict's place before 3.13 */
};
enum { N_CONTAINERS = sizeof containers / sizeof containers[0] }; /* constant: 3.13's Py_ARRAY_LENGTH isn't */
static objobjproc plain_contains[N_CONTAINERS];
static PyMethodDef *has_def, *get_def; /* of dict: subclasses (a Counter) go through the first */
static PyCFunction plain_has, plain_get;
static THREAD_LOCAL PyObject *computing; /* a function of a C function and a tuple of arguments */
static THREAD_LOCAL PyObject *drawing;   /* a function of a generator and bits, None for a float */
static PyMethodDef *random_def, *bits_def; /* of _random.Random */
static PyCFunction plain_random, plain_bits;
static PyTypeObject *generator_type;
static int n_drawing; /* threads */
static THREAD_LOCAL PyObject *making; /* a function of a class, a tuple and a dict or None */
static PyObject *made;                /* a tuple of classes, for as long as the process lives */
static PyTypeObject *metas[2];        /* their metaclasses */
static ternaryfunc plain_calls[2];
static int n_making; /* threads */

typedef struct {
    PyCFunctionObject *function; /* for as long as the process lives */
    PyMethodDef *plain_def, def;
    vectorcallfunc plain_call; /* NULL: it takes a tuple and a dict */
} Answered;
static Answered *functions;
static Py_ssize_t n_functions;

typedef struct {
    PyMethodDescrObject *method; /* for as long as the process lives */
    vectorcallfunc plain_call;
} Method;
static Method *methods;
static Py_ssize_t n_methods;
static ternaryfunc plain_operator;
static descrgetfunc plain_bind;
static THREAD_LOCAL PyObject *unbinding; /* a function of a method, a tuple and a dict or None */

static int is_asked(PyObject *argument) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(classes); i++) {
        /* By its class: `__class__` may say something else. */
        if (PyType_IsSubtype(Py_TYPE(argument), (PyTypeObject *)PyTuple_GET_ITEM(classes, i))) {
            return 1;
        }
    }
    return 0;
}

/* A call by a way that takes a tuple and a dict. */
static PyObject *call_packed(ternaryfunc call, PyObject *callable, PyObject *const *args,
                             size_t nargsf, PyObject *names) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf), n_named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *found = NULL, *named = n_named ? PyDict_New() : NULL, *given = PyTuple_New(n);
    if (given == NULL || (n_named && named == NULL)) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    }
    for (Py_ssize_t i = 0; i < n_named; i++) {
        if (PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[n + i]) < 0) {
            goto done;
        }
    }
    found = call(callable, given, named);
done:
    Py_XDECREF(given);
    Py_XDECREF(named);
    return found;
}

/* The call of a class as it always is. */
static PyObject *call_plainly(PyObject *cls, PyObject *const *args, size_t nargsf,
                              PyObject *names) {
    vectorcallfunc plain = cls == (PyObject *)&PyFloat_Type ? plain_float : plain_int;
    return plain != NULL ? plain(cls, args, nargsf, names)
                         : call_packed(PyType_Type.tp_call, cls, args, nargsf, names);
}

static PyObject *cast(PyObject *cls, PyObject *const *args, size_t nargsf, PyObject *names) {
    if (answer != NULL && names == NULL && PyVectorcall_NARGS(nargsf) == 1 && is_asked(args[0])) {
        PyObject *asked = Py_NewRef(answer); /* it may be told to stop meanwhile */
        PyObject *found = PyObject_CallFunctionObjArgs(asked, cls, args[0], NULL);
        Py_DECREF(asked);
        if (found != Py_NotImplemented) {
            return found;
        }
        Py_DECREF(found);
    }
    return call_plainly(cls, args, nargsf, names);
}

static int is_key(PyObject *argument) {
    return PyObject_TypeCheck(argument, key_type);
}

static int is_any(int (*is)(PyObject *), PyObject *args, PyObject *named) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (is(PyTuple_GET_ITEM(args, i))) {
            return 1;
        }
    }
    PyObject *value;
    Py_ssize_t at = 0;
    while (named != NULL && PyDict_Next(named, &at, NULL, &value)) {
        if (is(value)) {
            return 1;
        }
    }
    return 0;
}

/* A new reference to the memo that answers: this one, or one that the run has. NULL: an error. */
static PyObject *find_memo(PyObject *memo, PyObject *args, PyObject *named) {
    if (is_any(is_key, args, named)) {
        PyObject *asked = remembering, *seen = remembered;
        remembering = remembered = NULL; /* it may call functions behind lru_cache itself */
        PyObject *found = PyObject_CallFunctionObjArgs(asked, memo, args, named ? named : Py_None, NULL);
        if (remembering != NULL) { /* somebody else was set meanwhile */
            Py_DECREF(asked);
            Py_DECREF(seen);
        } else {
            remembering = asked;
            remembered = seen;
        }
        if (found == NULL || Py_TYPE(found) == memo_type) {
            return found;
        }
        Py_DECREF(found);
    }
    PyObject *identity = PyLong_FromVoidPtr(memo);
    int failed = identity == NULL || (remembered != NULL && PySet_Add(remembered, identity) < 0);
    Py_XDECREF(identity);
    return failed ? NULL : Py_NewRef(memo);
}

static PyObject *call_memo(PyObject *memo, PyObject *args, PyObject *named);

static PyObject *remember(PyObject *memo, PyObject *args, PyObject *named) {
    if (remembering == NULL) {
        return call_memo(memo, args, named);
    }
    PyObject *asked = find_memo(memo, args, named);
    PyObject *found = asked == NULL ? NULL : call_memo(asked, args, named);
    Py_XDECREF(asked);
    return found;
}

static PyObject *call_memo(PyObject *memo, PyObject *args, PyObject *named) {
    if (answer == NULL || !is_any(is_asked, args, named)) {
        return plain_memo(memo, args, named);
    }
    PyObject *asked = Py_NewRef(closing);
    PyObject *given = PyObject_CallFunctionObjArgs(asked, args, named ? named : Py_None, NULL);
    Py_DECREF(asked);
    if (given == NULL) {
        return NULL;
    }
    PyObject *used, *used_named, *found = NULL;
    if (PyArg_ParseTuple(given, "O!O", &PyTuple_Type, &used, &used_named)) {
        found = plain_memo(memo, used, named ? used_named : NULL);
    }
    Py_DECREF(given);
    return found;
}

static PyObject *find_item(PyObject *owner, PyObject *index) {
    if (picking != NULL && is_asked(index)) {
        PyObject *asked = Py_NewRef(picking);
        PyObject *found = PyObject_CallFunctionObjArgs(asked, owner, index, NULL);
        Py_DECREF(asked);
        if (found != Py_NotImplemented) {
            return found;
        }
        Py_DECREF(found);
    }
    binaryfunc plain = PyList_Check(owner)    ? plain_list_item
                       : PyTuple_Check(owner) ? plain_tuple_item
                                              : plain_array_item;
    return plain(owner, index);
}

/* 1 or 0: whether a container has it; 2: nobody says; -1: an error. */
static int ask_whether(PyObject *owner, PyObject *wanted) {
    if (containing == NULL || !is_asked(wanted)) {
        return 2;
    }
    PyObject *asked = Py_NewRef(containing);
    PyObject *found = PyObject_CallFunctionObjArgs(asked, owner, wanted, NULL);
    Py_DECREF(asked);
    int is_there = found == NULL ? -1 : found == Py_NotImplemented ? 2 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return is_there;
}

static int contains(PyObject *owner, PyObject *wanted) {
    int is_there = ask_whether(owner, wanted);
    for (int i = 0; is_there == 2 && i < N_CONTAINERS; i++) {
        if (PyObject_TypeCheck(owner, containers[i])) {
            return plain_contains[i](owner, wanted);
        }
    }
    return is_there;
}

static PyObject *has_item(PyObject *owner, PyObject *wanted) {
    int is_there = ask_whether(owner, wanted);
    return is_there == 2 ? plain_has(owner, wanted) : is_there == -1 ? NULL : PyBool_FromLong(is_there);
}

static PyObject *get_item(PyObject *owner, PyObject *const *args, Py_ssize_t n) {
    int is_there = n == 1 || n == 2 ? ask_whether(owner, args[0]) : 2;
    if (is_there == -1) {
        return NULL;
    }
    if (is_there == 0) {
        return Py_NewRef(n == 2 ? args[1] : Py_None);
    }
    return ((_PyCFunctionFast)(void (*)(void))plain_get)(owner, args, n);
}

/* Whether a function gets an open number or a tensor: as it is, or in the only argument. */
static int is_one_asked(PyObject *const *args, Py_ssize_t n) {
    if (n == 1 && (PyTuple_CheckExact(args[0]) || PyList_CheckExact(args[0]))) {
        PyObject *items = args[0];
        n = PySequence_Fast_GET_SIZE(items);
        args = PySequence_Fast_ITEMS(items);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (is_asked(args[i])) {
            return 1;
        }
    }
    return 0;
}

static PyObject *call_function(PyObject *callable, PyObject *const *args, size_t nargsf,
                               PyObject *names) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (computing != NULL && names == NULL && is_one_asked(args, n)) {
        PyObject *given = PyTuple_New(n);
        if (given == NULL) {
            return NULL;
        }
        for (Py_ssize_t i = 0; i < n; i++) {
            PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
        }
        PyObject *asked = Py_NewRef(computing);
        PyObject *found = PyObject_CallFunctionObjArgs(asked, callable, given, NULL);
        Py_DECREF(asked);
        Py_DECREF(given);
        if (found != Py_NotImplemented) {
            return found;
        }
        Py_DECREF(found);
    }
    for (Py_ssize_t i = 0; i < n_functions; i++) {
        if ((PyObject *)functions[i].function == callable && functions[i].plain_call != NULL) {
            return functions[i].plain_call(callable, args, nargsf, names);
        }
    }
    return call_packed(PyCFunction_Type.tp_call, callable, args, nargsf, names);
}

/* Remember which functions are to be answered, the first time. */
static int find_functions(PyObject *wanted) {
    if (functions != NULL) {
        return 0;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(wanted);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!PyCFunction_CheckExact(PyTuple_GET_ITEM(wanted, i))) {
            PyErr_SetString(PyExc_TypeError, "start() takes a tuple of functions that C has");
            return -1;
        }
    }
    functions = PyMem_Calloc(n ? n : 1, sizeof(Answered));
    if (functions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (n_functions = 0; n_functions < n; n_functions++) {
        functions[n_functions].function =
            (PyCFunctionObject *)Py_NewRef(PyTuple_GET_ITEM(wanted, n_functions));
    }
    return 0;
}

static void swap_functions(int is_answered) {
    for (Py_ssize_t i = 0; i < n_functions; i++) {
        Answered *one = &functions[i];
        if (is_answered) {
            one->plain_def = one->function->m_ml;
            one->plain_call = one->function->vectorcall;
            one->def = *one->plain_def;
            one->def.ml_flags |= METH_COEXIST;
        }
        one->function->m_ml = is_answered ? &one->def : one->plain_def;
        one->function->vectorcall = is_answered ? call_function : one->plain_call;
    }
}

/* What the run says that a method of a class gives; NULL without an error: what it always gives. */
static PyObject *ask_method(PyObject *method, PyObject *args, PyObject *named) {
    if (unbinding == NULL || !is_any(is_asked, args, NULL)) {
        return NULL;
    }
    PyObject *asked = Py_NewRef(unbinding);
    PyObject *found = PyObject_CallFunctionObjArgs(asked, method, args, named ? named : Py_None, NULL);
    Py_DECREF(asked);
    if (found == Py_None) { /* a tuple of one otherwise */
        Py_DECREF(found);
        return NULL;
    }
    PyObject *value = found == NULL ? NULL : Py_NewRef(PyTuple_GET_ITEM(found, 0));
    Py_XDECREF(found);
    return value;
}

static PyObject *call_method(PyObject *method, PyObject *const *args, size_t nargsf, PyObject *names) {
    Py_ssize_t i = 0;
    while (unbinding != NULL && i < PyVectorcall_NARGS(nargsf)) {
        if (is_asked(args[i++])) {
            PyObject *found = call_packed(ask_method, method, args, nargsf, names);
            if (found != NULL || PyErr_Occurred()) {
                return found;
            }
            break;
        }
    }
    for (i = 0; (PyObject *)methods[i].method != method; i++) {
    }
    return methods[i].plain_call(method, args, nargsf, names);
}

/* Where a method of any class is bound to an object: by 3.11, for a profile function, before each call. */
static PyObject *bind_method(PyObject *method, PyObject *owner, PyObject *cls) {
    PyTypeObject *of = PyDescr_TYPE(method);
    if (unbinding != NULL && owner != NULL && (of == &PyLong_Type || of == &PyFloat_Type)
        && is_asked(owner)) {
        return PyMethod_New(method, owner);
    }
    return plain_bind(method, owner, cls);
}

/* It is called for the methods of all classes. */
static PyObject *call_operator(PyObject *method, PyObject *args, PyObject *named) {
    PyTypeObject *cls = PyDescr_TYPE(method);
    if (unbinding != NULL && (cls == &PyLong_Type || cls == &PyFloat_Type)) {
        PyObject *found = ask_method(method, args, named);
        if (found != NULL || PyErr_Occurred()) {
            return found;
        }
    }
    return plain_operator(method, args, named);
}

/* Remember which methods are to be answered, the first time. */
static int find_methods(PyObject *wanted) {
    Py_ssize_t n = PyTuple_GET_SIZE(wanted);
    if (methods != NULL) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(wanted, i), &PyMethodDescr_Type)) {
            PyErr_SetString(PyExc_TypeError, "start() takes a tuple of methods of classes that C has");
            return -1;
        }
    }
    methods = PyMem_Calloc(n ? n : 1, sizeof(Method));
    if (methods == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (n_methods = 0; n_methods < n; n_methods++) {
        methods[n_methods].method = (PyMethodDescrObject *)Py_NewRef(PyTuple_GET_ITEM(wanted, n_methods));
    }
    return 0;
}

static void swap_methods(int is_answered) {
    for (Py_ssize_t i = 0; i < n_methods; i++) {
        if (is_answered) {
            methods[i].plain_call = methods[i].method->vectorcall;
        }
        methods[i].method->vectorcall = is_answered ? call_method : methods[i].plain_call;
    }
    if (is_answered) {
        plain_operator = PyWrapperDescr_Type.tp_call;
        plain_bind = PyMethodDescr_Type.tp_descr_get;
    }
    PyMethodDescr_Type.tp_descr_get = is_answered ? bind_method : plain_bind;
    PyWrapperDescr_Type.tp_call = is_answered ? call_operator : plain_operator;
}

static PyObject *draw(PyObject *generator, PyObject *bits, PyCFunction plain) {
    if (drawing != NULL) {
        PyObject *asked = Py_NewRef(drawing);
        PyObject *found = PyObject_CallFunctionObjArgs(asked, generator, bits ? bits : Py_None, NULL);
        Py_DECREF(asked);
        if (found != Py_NotImplemented) {
            return found;
        }
        Py_DECREF(found);
    }
    return plain(generator, bits);
}

static PyObject *draw_random(PyObject *generator, PyObject *Py_UNUSED(nothing)) {
    return draw(generator, NULL, plain_random);
}

static PyObject *draw_bits(PyObject *generator, PyObject *bits) {
    return draw(generator, bits, plain_bits);
}

/* What a class has for a method, which every way to call it goes through. */
static PyMethodDef *find_method(PyObject *cls, const char *name, int flags) {
    PyObject *found = PyObject_GetAttrString(cls, name);
    PyMethodDef *def = NULL;
    if (found != NULL && Py_IS_TYPE(found, &PyMethodDescr_Type)) {
        def = ((PyMethodDescrObject *)found)->d_method;
    }
    Py_XDECREF(found); /* its class keeps it */
    if (def == NULL || def->ml_flags != flags) {
        PyErr_Format(PyExc_RuntimeError, "%R.%s isn't what it was", cls, name);
        return NULL;
    }
    return def;
}

/* The class of all of Python's generators, and its two methods: looked for the first time. */
static int find_generators(void) {
    if (bits_def != NULL) {
        return 0;
    }
    PyObject *module = PyImport_ImportModule("_random");
    PyObject *cls = module == NULL ? NULL : PyObject_GetAttrString(module, "Random");
    Py_XDECREF(module);
    if (cls == NULL) {
        return -1;
    }
    generator_type = (PyTypeObject *)cls; /* for as long as the process lives */
    random_def = find_method(cls, "random", METH_NOARGS);
    bits_def = random_def == NULL ? NULL : find_method(cls, "getrandbits", METH_O);
    return bits_def == NULL ? -1 : 0;
}

static void swap_draws(int is_answered) {
    if (is_answered) {
        plain_random = random_def->ml_meth;
        plain_bits = bits_def->ml_meth;
    }
    random_def->ml_meth = is_answered ? draw_random : plain_random;
    bits_def->ml_meth = is_answered ? draw_bits : plain_bits;
}

/* Where a generator stands is in its memory behind the head of the object: numbers, no reference.
   Its own functions take a tuple of 625 ints for that: 0.1 µs instead of 19. */
static PyObject *copy_generator(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *from, *to;
    if (find_generators() < 0
        || !PyArg_ParseTuple(args, "O!O!:copy_generator", generator_type, &from, generator_type, &to)) {
        return NULL;
    }
    memcpy((char *)to + sizeof(PyObject), (char *)from + sizeof(PyObject),
           generator_type->tp_basicsize - sizeof(PyObject));
    Py_RETURN_NONE;
}

static void swap_containers(int is_answered) {
    for (int i = 0; is_answered && i < N_CONTAINERS; i++) { /* some share one place */
        plain_contains[i] = containers[i]->tp_as_sequence->sq_contains;
    }
    for (int i = 0; i < N_CONTAINERS; i++) {
        containers[i]->tp_as_sequence->sq_contains = is_answered ? contains : plain_contains[i];
    }
    has_def->ml_meth = is_answered ? has_item : plain_has;
    get_def->ml_meth = is_answered ? (PyCFunction)(void (*)(void))get_item : plain_get;
}

/* The first time. */
static int find_containers(void) {
    if (get_def != NULL) {
        return 0;
    }
    PyObject *cls = (PyObject *)&PyDict_Type;
    has_def = find_method(cls, "__contains__", METH_O | METH_COEXIST);
    PyMethodDef *def = has_def == NULL ? NULL : find_method(cls, "get", METH_FASTCALL);
    PyObject *module = def == NULL ? NULL : PyImport_ImportModule("_collections");
    PyObject *derived = module == NULL ? NULL : PyObject_GetAttrString(module, "defaultdict");
    Py_XDECREF(module);
    if (derived == NULL) {
        return -1;
    }
    containers[N_CONTAINERS - 1] = (PyTypeObject *)derived; /* kept */
    plain_has = has_def->ml_meth;
    plain_get = def->ml_meth;
    get_def = def;
    return 0;
}

static int find_memo_type(void) {
    if (memo_type == NULL) {
        PyObject *functools = PyImport_ImportModule("functools");
        if (functools == NULL) {
            return -1;
        }
        PyObject *found = PyObject_GetAttrString(functools, "_lru_cache_wrapper");
        Py_DECREF(functools);
        if (found == NULL || !PyType_Check(found)) {
            Py_XDECREF(found);
            return -1;
        }
        memo_type = (PyTypeObject *)found; /* for as long as the process lives */
    }
    return 0;
}

static PyObject *make(PyObject *cls, PyObject *args, PyObject *named) {
    Py_ssize_t at = 0, n = making == NULL ? 0 : PyTuple_GET_SIZE(made);
    while (at < n && PyTuple_GET_ITEM(made, at) != cls) {
        at++;
    }
    if (at < n) {
        PyObject *asked = Py_NewRef(making);
        PyObject *found = PyObject_CallFunctionObjArgs(asked, cls, args, named ? named : Py_None, NULL);
        Py_DECREF(asked);
        if (found != Py_NotImplemented) {
            return found;
        }
        Py_DECREF(found);
    }
    return plain_calls[!PyType_IsSubtype(Py_TYPE(cls), metas[0])](cls, args, named);
}

static void swap_makers(int is_answered) {
    for (int i = 0; i < 2; i++) {
        if (is_answered) {
            plain_calls[i] = metas[i]->tp_call;
        }
        metas[i]->tp_call = is_answered ? make : plain_calls[i];
    }
}

static PyObject *stop_making(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    if (making != NULL) {
        if (--n_making == 0) {
            swap_makers(0);
        }
        Py_CLEAR(making);
    }
    Py_RETURN_NONE;
}

static PyObject *start_making(PyObject *module, PyObject *args) {
    PyObject *function, *classes_made;
    if (!PyArg_ParseTuple(args, "OO!:start_making", &function, &PyTuple_Type, &classes_made)) {
        return NULL;
    }
    if (made == NULL) {
        Py_ssize_t n = PyTuple_GET_SIZE(classes_made);
        PyTypeObject *first = n ? Py_TYPE(PyTuple_GET_ITEM(classes_made, 0)) : NULL;
        PyTypeObject *last = n ? Py_TYPE(PyTuple_GET_ITEM(classes_made, n - 1)) : NULL;
        if (n == 0 || first == last || !PyType_IsSubtype(first, &PyType_Type)
            || !PyType_IsSubtype(last, &PyType_Type)) {
            PyErr_SetString(PyExc_TypeError, "start_making() takes classes of two metaclasses");
            return NULL;
        }
        metas[0] = first; /* for as long as the process lives, as their classes do */
        metas[1] = last;
        made = Py_NewRef(classes_made);
    }
    Py_XDECREF(stop_making(module, NULL)); /* one function per thread */
    if (n_making++ == 0) {
        swap_makers(1);
    }
    making = Py_NewRef(function);
    Py_RETURN_NONE;
}

static void swap_memos(int is_answered) {
    if (is_answered && n_of_memos++ == 0) {
        plain_memo = memo_type->tp_call;
        memo_type->tp_call = remember;
    } else if (!is_answered && --n_of_memos == 0) {
        memo_type->tp_call = plain_memo;
    }
}

static PyObject *stop_remembering(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    if (remembering != NULL) {
        if (--n_remembering == 0) {
            swap_memos(0);
        }
        Py_CLEAR(remembering);
        Py_CLEAR(remembered);
    }
    Py_RETURN_NONE;
}

static PyObject *start_remembering(PyObject *module, PyObject *args) {
    PyObject *function, *seen;
    PyTypeObject *keys;
    if (!PyArg_ParseTuple(args, "OO!O!:start_remembering", &function, &PySet_Type, &seen, &PyType_Type,
                          &keys)
        || find_memo_type() < 0) {
        return NULL;
    }
    if (key_type == NULL) {
        key_type = (PyTypeObject *)Py_NewRef(keys); /* for as long as the process lives */
    }
    Py_XDECREF(stop_remembering(module, NULL)); /* one function per thread */
    if (n_remembering++ == 0) {
        swap_memos(1);
    }
    remembering = Py_NewRef(function);
    remembered = Py_NewRef(seen);
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    if (answer != NULL) {
        if (--n_answering == 0) {
            PyFloat_Type.tp_vectorcall = plain_float;
            PyLong_Type.tp_vectorcall = plain_int;
            swap_memos(0);
            PyList_Type.tp_as_mapping->mp_subscript = plain_list_item;
            PyTuple_Type.tp_as_mapping->mp_subscript = plain_tuple_item;
            if (plain_array_item != NULL) {
                array_type->tp_as_mapping->mp_subscript = plain_array_item;
            }
            swap_containers(0);
            swap_functions(0);
            swap_methods(0);
        }
        Py_CLEAR(answer);
        Py_CLEAR(classes);
        Py_CLEAR(closing);
        Py_CLEAR(picking);
        Py_CLEAR(containing);
        Py_CLEAR(computing);
        Py_CLEAR(unbinding);
    }
    if (drawing != NULL) {
        if (--n_drawing == 0) {
            swap_draws(0);
        }
        Py_CLEAR(drawing);
    }
    Py_RETURN_NONE;
}

/* NumPy's arrays, once somebody has imported NumPy. */
static int find_array_type(void) {
    PyObject *name = array_type == NULL ? PyUnicode_FromString("numpy") : NULL;
    PyObject *numpy = name == NULL ? NULL : PyImport_GetModule(name);
    Py_XDECREF(name);
    PyObject *found = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, "ndarray");
    Py_XDECREF(numpy);
    if (found != NULL && PyType_Check(found) && n_answering == 0
        && ((PyTypeObject *)found)->tp_as_mapping != NULL) {
        array_type = (PyTypeObject *)Py_NewRef(found); /* for as long as the process lives */
    }
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *start(PyObject *module, PyObject *args) {
    PyObject *function, *asked_of, *close, *pick, *contain, *compute, *wanted, *unbind, *unbound, *drawn;
    if (!PyArg_ParseTuple(args, "OO!OOOOO!OO!O:start", &function, &PyTuple_Type, &asked_of, &close,
                          &pick, &contain, &compute, &PyTuple_Type, &wanted, &unbind, &PyTuple_Type, &unbound,
                          &drawn)
        || find_memo_type() < 0 || find_array_type() < 0 || find_functions(wanted) < 0
        || find_methods(unbound) < 0
        || find_containers() < 0
        || (drawn != Py_None && find_generators() < 0)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(asked_of); i++) {
        if (!PyType_Check(PyTuple_GET_ITEM(asked_of, i))) {
            PyErr_SetString(PyExc_TypeError, "start() takes a tuple of classes");
            return NULL;
        }
    }
    Py_XDECREF(stop(module, NULL)); /* one function per thread */
    if (n_answering++ == 0) {
        plain_float = PyFloat_Type.tp_vectorcall;
        plain_int = PyLong_Type.tp_vectorcall;
        PyFloat_Type.tp_vectorcall = cast;
        PyLong_Type.tp_vectorcall = cast;
        swap_memos(1);
        plain_list_item = PyList_Type.tp_as_mapping->mp_subscript;
        plain_tuple_item = PyTuple_Type.tp_as_mapping->mp_subscript;
        PyList_Type.tp_as_mapping->mp_subscript = find_item;
        PyTuple_Type.tp_as_mapping->mp_subscript = find_item;
        if (array_type != NULL) {
            plain_array_item = array_type->tp_as_mapping->mp_subscript;
            array_type->tp_as_mapping->mp_subscript = find_item;
        }
        swap_containers(1);
        swap_functions(1);
        swap_methods(1);
    }
    answer = Py_NewRef(function);
    classes = Py_NewRef(asked_of);
    closing = Py_NewRef(close);
    picking = Py_NewRef(pick);
    containing = Py_NewRef(contain);
    computing = Py_NewRef(compute);
    unbinding = Py_NewRef(unbind);
    if (drawn != Py_None) {
        if (n_drawing++ == 0) {
            swap_draws(1);
        }
        drawing = Py_NewRef(drawn);
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"start", start, METH_VARARGS, "Have this thread's calls answered."},
    {"copy_generator", copy_generator, METH_VARARGS, "Have one of Python's generators go on as another."},
    {"start_making", start_making, METH_VARARGS, "Have this thread asked for tensors of some classes."},
    {"stop_making", stop_making, METH_NOARGS, "Have them made plainly again; telling it twice is fine."},
    {"start_remembering", start_remembering, METH_VARARGS, "Have this thread asked which memo answers."},
    {"stop_remembering", stop_remembering, METH_NOARGS, "Have each answer itself; telling it twice is fine."},
    {"stop", stop, METH_NOARGS, "Have them made plainly again; telling it twice is fine."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    LAST_SLOTS,
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_casts",
    .m_doc = "float() and int(), answered by the run; casts.py says how.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__casts(void) {
    return PyModuleDef_Init(&module_def);
}
