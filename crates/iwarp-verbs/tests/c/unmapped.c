/* Tests of a program that unmaps, protects or truncates registered memory. The access fails, but
 * the process and its other connections continue. The second argument selects the program's
 * handlers for SIGSEGV and SIGBUS. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { LARGE = 65536, SMALL = 64, TIMEOUT_MS = 20000 };

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

struct pair {
	struct end a, b;
};

enum loss { UNMAP, PROTECT, TRUNCATE, READ_ONLY, LOSSES };

struct memory {
	enum loss loss;
	int file;
	char *addr;
	struct ibv_mr *mr;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static union ibv_gid gid;
static char *buffer;

/* The address of the next mapping. It is far from addresses that the kernel chooses, so no other
 * mapping reuses it. */
static char *next_place = (char *)0x7ea000000000;

static struct end create_end(enum ibv_qp_type type)
{
	struct end e = { .cq = ibv_create_cq(context, 64, NULL, NULL, 0) };
	struct ibv_qp_init_attr attr = {
		.send_cq = e.cq,
		.recv_cq = e.cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2 },
		.qp_type = type, .sq_sig_all = 1,
	};

	NEED(e.cq);
	e.qp = ibv_create_qp(pd, &attr);
	NEED(e.qp);
	return e;
}

static void move_to_rts(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	};

	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = peer->qp->qp_num;
	attr.max_dest_rd_atomic = 4;
	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
		.grh = { .dgid = gid, .hop_limit = 1 } };
	CODE(0, ibv_modify_qp(e->qp, &attr,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	/* The requests fail after about 17 s, because threads may be delayed on a loaded machine. */
	attr.timeout = 19;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 4;
	CODE(0, ibv_modify_qp(e->qp, &attr,
			      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct pair create_pair(void)
{
	struct pair p = { create_end(IBV_QPT_RC), create_end(IBV_QPT_RC) };

	move_to_rts(&p.a, &p.b);
	move_to_rts(&p.b, &p.a);
	return p;
}

static void destroy_pair(struct pair *p)
{
	struct end *ends[] = { &p->a, &p->b };

	for (int i = 0; i < 2; i++) {
		CODE(0, ibv_destroy_qp(ends[i]->qp));
		CODE(0, ibv_destroy_cq(ends[i]->cq));
	}
}

static enum ibv_wc_status next_status(struct end *e)
{
	struct ibv_wc wc = { 0 };

	for (int left = TIMEOUT_MS; left > 0; left--) {
		int n = ibv_poll_cq(e->cq, 1, &wc);

		NEED(n >= 0);
		if (n)
			return wc.status;
		usleep(1000);
	}
	NEED(!"no completion before the timeout");
	exit(2);
}

static void post(struct end *e, enum ibv_wr_opcode opcode, char *addr, uint32_t len, uint32_t lkey,
	char *to, uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)addr, len, lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)to;
	wr.wr.rdma.rkey = rkey;
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)to;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.rkey = rkey;
	}
	NEED(ibv_post_send(e->qp, &wr, &bad) == 0);
}

static void receive(struct end *e, char *addr, uint32_t len, uint32_t lkey)
{
	struct ibv_sge sge = { (uintptr_t)addr, len, lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

static struct memory map_and_register(enum loss loss)
{
	struct memory m = { .loss = loss, .file = -1 };
	int flags = MAP_FIXED_NOREPLACE, all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
						IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

	if (loss == TRUNCATE) {
		m.file = memfd_create("unmapped", 0);
		NEED(m.file >= 0 && ftruncate(m.file, LARGE) == 0);
	}
	flags |= loss == TRUNCATE ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
	m.addr = mmap(next_place, LARGE, PROT_READ | PROT_WRITE, flags, m.file, 0);
	NEED(m.addr == next_place);
	next_place += 2 * LARGE;
	memset(m.addr, 'm', LARGE);
	m.mr = ibv_reg_mr(pd, m.addr, LARGE, all);
	NEED(m.mr);
	return m;
}

/* Makes the memory inaccessible, or all but its first page if `part` is set. */
static void make_inaccessible(struct memory *m, int part)
{
	size_t kept = part ? (size_t)getpagesize() : 0;

	switch (m->loss) {
	case UNMAP:
		NEED(munmap(m->addr + kept, LARGE - kept) == 0);
		break;
	case PROTECT:
		NEED(mprotect(m->addr + kept, LARGE - kept, PROT_NONE) == 0);
		break;
	case TRUNCATE:
		NEED(ftruncate(m->file, (off_t)kept) == 0);
		break;
	default:
		NEED(mprotect(m->addr + kept, LARGE - kept, PROT_READ) == 0);
	}
}

static void destroy_memory(struct memory *m)
{
	CODE(0, ibv_dereg_mr(m->mr));
	munmap(m->addr, LARGE);
	if (m->file >= 0)
		close(m->file);
}

static void check_other_connection(struct pair *other)
{
	static char octet;

	buffer[0] = ++octet;
	receive(&other->b, buffer + LARGE, SMALL, mr->lkey);
	post(&other->a, IBV_WR_SEND, buffer, SMALL, mr->lkey, NULL, 0);
	CODE(IBV_WC_SUCCESS, next_status(&other->a));
	CODE(IBV_WC_SUCCESS, next_status(&other->b));
	CHECK(buffer[LARGE] == octet);
	buffer[0] = ++octet;
	post(&other->b, IBV_WR_RDMA_WRITE, buffer, LARGE, mr->lkey, buffer + LARGE, mr->rkey);
	CODE(IBV_WC_SUCCESS, next_status(&other->b));
	CHECK(buffer[LARGE] == octet);
}

enum role { SOURCE_OF_READ, TARGET_OF_WRITE, ATOMIC, SOURCE_OF_SEND, SOURCE_OF_WRITE, RECEIVE,
	SINK_OF_READ, ROLES };

/* Accesses inaccessible memory with one request. */
static void access_memory(enum role role, struct memory *m, uint32_t len, int part)
{
	struct pair p = create_pair();
	char *addr = m->addr, *other_memory = buffer;
	enum ibv_wc_status expected = IBV_WC_REM_ACCESS_ERR;
	int failed = failures;

	/* If `part` is set, a large access begins in the accessible first page. */
	if (part && len == SMALL)
		addr += LARGE - SMALL;
	if (role == RECEIVE)
		receive(&p.b, addr, len, m->mr->lkey);
	if (role == SOURCE_OF_SEND)
		receive(&p.b, other_memory, LARGE, mr->lkey);
	make_inaccessible(m, part);
	switch (role) {
	case SOURCE_OF_READ:
		post(&p.a, IBV_WR_RDMA_READ, other_memory, len, mr->lkey, addr, m->mr->rkey);
		break;
	case TARGET_OF_WRITE:
		post(&p.a, IBV_WR_RDMA_WRITE, other_memory, len, mr->lkey, addr, m->mr->rkey);
		break;
	case ATOMIC:
		post(&p.a, IBV_WR_ATOMIC_FETCH_AND_ADD, other_memory, 8, mr->lkey, m->addr + LARGE - 8,
			m->mr->rkey);
		break;
	case SOURCE_OF_SEND:
		post(&p.a, IBV_WR_SEND, addr, len, m->mr->lkey, NULL, 0);
		expected = IBV_WC_LOC_PROT_ERR;
		break;
	case SOURCE_OF_WRITE:
		post(&p.a, IBV_WR_RDMA_WRITE, addr, len, m->mr->lkey, other_memory, mr->rkey);
		expected = IBV_WC_LOC_PROT_ERR;
		break;
	case RECEIVE:
		post(&p.a, IBV_WR_SEND, other_memory, len, mr->lkey, NULL, 0);
		CODE(IBV_WC_LOC_PROT_ERR, next_status(&p.b));
		expected = IBV_WC_REM_OP_ERR;
		break;
	default:
		post(&p.a, IBV_WR_RDMA_READ, addr, len, m->mr->lkey, other_memory, mr->rkey);
		expected = IBV_WC_LOC_PROT_ERR;
	}
	CODE(expected, next_status(&p.a));
	if (failures != failed)
		fprintf(stderr, "role %d, loss %d, %u octets, part %d\n", role, m->loss, len, part);
	destroy_pair(&p);
}

static int needs_write_access(enum role role)
{
	return role == TARGET_OF_WRITE || role == ATOMIC || role == RECEIVE || role == SINK_OF_READ;
}

static void move_datagrams_to_rts(struct end *e)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };

	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void access_by_datagram(enum loss loss, int receives)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 1 } };
	struct pair p = { create_end(IBV_QPT_UD), create_end(IBV_QPT_UD) };
	struct memory m = map_and_register(loss);
	struct ibv_sge sge = { (uintptr_t)m.addr, SMALL, m.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	move_datagrams_to_rts(&p.a);
	move_datagrams_to_rts(&p.b);
	wr.wr.ud.ah = ibv_create_ah(pd, &to);
	wr.wr.ud.remote_qpn = p.b.qp->qp_num;
	wr.wr.ud.remote_qkey = 7;
	NEED(wr.wr.ud.ah);
	if (receives) {
		receive(&p.b, m.addr, LARGE, m.mr->lkey);
		sge = (struct ibv_sge){ (uintptr_t)buffer, SMALL, mr->lkey };
	}
	make_inaccessible(&m, 0);
	CODE(0, ibv_post_send(p.a.qp, &wr, &bad));
	CODE(receives ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR, next_status(&p.a));
	if (receives)
		CODE(IBV_WC_LOC_PROT_ERR, next_status(&p.b));
	CODE(0, ibv_destroy_ah(wr.wr.ud.ah));
	destroy_pair(&p);
	destroy_memory(&m);
}

static void access_all(struct pair *other)
{
	for (int loss = 0; loss < LOSSES; loss++) {
		if (loss != READ_ONLY)
			access_by_datagram(loss, 0);
		access_by_datagram(loss, 1);
	}
	for (int role = 0; role < ROLES; role++)
		for (int loss = 0; loss < LOSSES; loss++)
			for (int kind = 0; kind < 4; kind++) {
				struct memory m;

				if (loss == READ_ONLY && !needs_write_access(role))
					continue;
				m = map_and_register(loss);
				access_memory(role, &m, kind & 1 ? LARGE : SMALL, kind >> 1);
				destroy_memory(&m);
				check_other_connection(other);
			}
}

/* Registration fails if any page of the range is inaccessible. */
static void test_refused_registration(void)
{
	int file = memfd_create("short", 0), rights = IBV_ACCESS_LOCAL_WRITE, page = getpagesize();
	char *addr;

	NEED(file >= 0 && ftruncate(file, 2 * page + 1) == 0);
	addr = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	NEED(addr != MAP_FAILED);
	IS_NULL(EFAULT, ibv_reg_mr(pd, addr, 4 * page, rights));
	IS_NULL(EFAULT, ibv_reg_mr(pd, addr + 3 * page, 1, rights));
	for (int pages = 1; pages <= 3; pages++) {
		struct ibv_mr *good = ibv_reg_mr(pd, addr, pages * page, rights);

		CHECK(good != NULL);
		if (good)
			CODE(0, ibv_dereg_mr(good));
	}
	NEED(mprotect(addr, page, PROT_READ) == 0);
	IS_NULL(EFAULT, ibv_reg_mr(pd, addr, 2 * page, rights));
	NEED(mprotect(addr, page, PROT_NONE) == 0);
	IS_NULL(EFAULT, ibv_reg_mr(pd, addr, 2 * page, 0));
	NEED(munmap(addr, page) == 0);
	IS_NULL(EFAULT, ibv_reg_mr(pd, addr, 2 * page, 0));
	NEED(munmap(addr + page, 3 * page) == 0);
	close(file);
}

static sigjmp_buf return_point;
static volatile sig_atomic_t calls, signal_seen, on_stack;
static void *volatile address;
static char *stack;
static struct sigaction previous[2];

static int is_on_stack(const void *local)
{
	return stack && (const char *)local >= stack && (const char *)local < stack + 4 * SIGSTKSZ;
}

static void handler_with_info(int signal, siginfo_t *info, void *ucontext)
{
	char local = 0;

	(void)ucontext;
	calls++;
	signal_seen = signal;
	address = info->si_addr;
	on_stack = is_on_stack(&local);
	siglongjmp(return_point, 1);
}

static void handler_without_info(int signal)
{
	char local = 0;

	calls++;
	signal_seen = signal;
	on_stack = is_on_stack(&local);
	siglongjmp(return_point, 1);
}

/* Calls the previous handler, as crash reporters do. */
static void chaining_handler(int signal, siginfo_t *info, void *ucontext)
{
	const struct sigaction *old = &previous[signal == SIGBUS];

	calls++;
	if (old->sa_flags & SA_SIGINFO)
		old->sa_sigaction(signal, info, ucontext);
	else
		_exit(3);
}

static void install(int flags, void (*handler)(int, siginfo_t *, void *), void (*simple)(int))
{
	struct sigaction action = { .sa_flags = flags };

	sigaddset(&action.sa_mask, SIGUSR1);
	if (flags & SA_SIGINFO)
		action.sa_sigaction = handler;
	else
		action.sa_handler = simple;
	NEED(sigaction(SIGSEGV, &action, &previous[0]) == 0 && sigaction(SIGBUS, &action,
		&previous[1]) == 0);
}

static void set_signal_stack(void)
{
	stack_t alternate = { .ss_size = 4 * SIGSTKSZ };

	stack = malloc(alternate.ss_size);
	alternate.ss_sp = stack;
	NEED(stack && sigaltstack(&alternate, NULL) == 0);
}

/* The program's own faults reach its handler, with the fault address and on the selected stack. */
static void test_own_faults(int flags)
{
	char *page = mmap(NULL, 2, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int before = calls;

	NEED(page != MAP_FAILED);
	address = NULL;
	if (sigsetjmp(return_point, 1) == 0) {
		*(volatile char *)(page + 1) = 1;
		CHECK(!"the write did not fault");
	}
	CHECK(calls == before + 1 && signal_seen == SIGSEGV);
	CHECK(!(flags & SA_SIGINFO) || address == page + 1);
	CHECK(on_stack == ((flags & SA_ONSTACK) != 0));
	munmap(page, 2);
}

/* A signal sent by a process also reaches the handler. */
static void test_sent_signals(void)
{
	int before = calls;

	if (sigsetjmp(return_point, 1) == 0) {
		raise(SIGBUS);
		CHECK(!"the handler was not called");
	}
	CHECK(calls == before + 1 && signal_seen == SIGBUS);
}

/* Runs `body` in a child process. Returns the signal that ended it, or the negated exit code. */
static int run_in_child(void (*body)(void))
{
	int status;
	pid_t child = fork();

	NEED(child >= 0);
	if (child == 0) {
		body();
		_exit(0);
	}
	NEED(waitpid(child, &status, 0) == child);
	return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static void fault(void)
{
	*(volatile char *)8 = 1;
}

static void send_fault(void)
{
	kill(getpid(), SIGSEGV);
}

static void send_bus_error(void)
{
	raise(SIGBUS);
}

static void *access_all_in_thread(void *other)
{
	sigset_t all;

	sigfillset(&all);
	NEED(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
	access_all(other);
	return NULL;
}

/* The library regularly checks its signal handler when a completion queue is polled. This polls
 * until it has done so. */
static void poll_for_handler(struct pair *p)
{
	struct ibv_wc wc;

	for (int i = 0; i < 8192; i++)
		CHECK(ibv_poll_cq(p->a.cq, 1, &wc) == 0);
}

static int parse_flags(const char *mode)
{
	int flags = 0;

	if (strstr(mode, "stack"))
		flags |= SA_ONSTACK;
	if (strstr(mode, "info"))
		flags |= SA_SIGINFO;
	if (strstr(mode, "node"))
		flags |= SA_NODEFER;
	if (strstr(mode, "once"))
		flags |= SA_RESETHAND;
	return flags;
}

static struct ibv_device **open_device(void)
{
	struct ibv_device **list;

	list = ibv_get_device_list(NULL);
	NEED(list && list[0]);
	context = ibv_open_device(list[0]);
	pd = ibv_alloc_pd(context);
	buffer = calloc(2, LARGE);
	NEED(pd && buffer && ibv_query_gid(context, 1, 0, &gid) == 0);
	mr = ibv_reg_mr(pd, buffer, 2 * LARGE,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				IBV_ACCESS_REMOTE_ATOMIC);
	NEED(mr);
	return list;
}

int main(int count, char **words)
{
	const char *mode = count > 2 ? words[2] : "none";
	struct ibv_device **list;
	struct pair other;
	pthread_t thread;
	/* The runtime of another language installs its own handlers and stacks. */
	int flags = parse_flags(mode), before, after, runtime = strcmp(mode, "runtime") == 0;

	before = strncmp(mode, "before", 6) == 0;
	after = strncmp(mode, "after", 5) == 0;
	if (before || after)
		set_signal_stack();
	if (before)
		install(flags, handler_with_info, handler_without_info);
	if (strcmp(mode, "ignored") == 0) {
		signal(SIGSEGV, SIG_IGN);
		signal(SIGBUS, SIG_IGN);
	}
	list = open_device();
	other = create_pair();
	check_other_connection(&other);
	test_refused_registration();
	if (after) {
		install(flags, handler_with_info, handler_without_info);
		poll_for_handler(&other);
	}
	if (strcmp(mode, "chain") == 0) {
		/* Installs this handler twice. In between, the library installs its own handler again. */
		install(SA_SIGINFO, chaining_handler, NULL);
		poll_for_handler(&other);
		install(SA_SIGINFO, chaining_handler, NULL);
		poll_for_handler(&other);
	}
	if (runtime)
		access_all(&other);
	if (runtime || strcmp(mode, "blocked") == 0) {
		NEED(pthread_create(&thread, NULL, access_all_in_thread, &other) == 0);
		NEED(pthread_join(thread, NULL) == 0);
	} else {
		access_all(&other);
	}
	CHECK(calls == 0);
	if (before || after) {
		test_own_faults(flags);
		test_sent_signals();
		if (flags & SA_RESETHAND) {
			CODE(SIGSEGV, run_in_child(fault));
			CODE(SIGBUS, run_in_child(send_bus_error));
		} else {
			test_own_faults(flags);
			test_sent_signals();
		}
		before = calls;
		access_all(&other);
		CHECK(calls == before);
	} else if (!runtime) {
		CODE(SIGSEGV, run_in_child(fault));
		CODE(strcmp(mode, "ignored") ? SIGSEGV : 0, run_in_child(send_fault));
		CODE(strcmp(mode, "ignored") ? SIGBUS : 0, run_in_child(send_bus_error));
	}
	destroy_pair(&other);
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	ibv_free_device_list(list);
	free(buffer);
	return result();
}
