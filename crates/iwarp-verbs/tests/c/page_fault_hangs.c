/* Tests of page faults in registered memory that hang, made with userfaultfd(2). The connection
 * that accesses the memory waits. All other connections continue. When the fault ends, the process
 * can register memory again. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "connection.h"

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

enum { PAGES = 1 << 16, ROUNDS = 20 };

struct note {
	int port;
	uint32_t rkey;
	uint64_t addr;
};

static int fault_fd = -1;

static void send_note(int to, struct note note)
{
	NEED(write(to, &note, sizeof(note)) == sizeof(note));
}

static struct note receive_note(int from)
{
	struct note note;

	NEED(read(from, &note, sizeof(note)) == sizeof(note));
	return note;
}

static void wait_for_fault(void)
{
	struct pollfd set = { fault_fd, POLLIN, 0 };
	struct uffd_msg message;

	NEED(poll(&set, 1, 30000) == 1);
	NEED(read(fault_fd, &message, sizeof(message)) == sizeof(message) &&
		message.event == UFFD_EVENT_PAGEFAULT);
}

static void end_fault(void *pages)
{
	struct uffdio_zeropage range = { .range = { (uintptr_t)pages, PAGES } };

	NEED(ioctl(fault_fd, UFFDIO_ZEROPAGE, &range) == 0);
}

static void *map_faulting_pages(void)
{
	void *pages = mmap(NULL, PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register range = { .range = { (uintptr_t)pages, PAGES },
		.mode = UFFDIO_REGISTER_MODE_MISSING };

	NEED(pages != MAP_FAILED && ioctl(fault_fd, UFFDIO_REGISTER, &range) == 0);
	return pages;
}

static void *register_memory(void *p)
{
	struct peer *peer = p;
	struct ibv_mr *mr = ibv_reg_mr(peer->pd, peer->buffer, sizeof(peer->buffer),
		IBV_ACCESS_LOCAL_WRITE);

	NEED(mr && ibv_dereg_mr(mr) == 0);
	return NULL;
}

/* The process whose memory has the page fault. */
static void serve(int to, int from)
{
	static struct peer stuck, good;
	struct note note = { .port = listen_on_free_port(&stuck) };
	pthread_t thread;
	struct ibv_mr *mr;
	void *pages;
	char octet;

	send_note(to, note);
	accept_connection(&stuck);
	/* Registration accesses the pages. After it, madvise makes them fault again. */
	pages = map_faulting_pages();
	end_fault(pages);
	mr = ibv_reg_mr(stuck.pd, pages, PAGES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	NEED(mr && madvise(pages, PAGES, MADV_DONTNEED) == 0);
	note = (struct note){ listen_on_free_port(&good), mr->rkey, (uintptr_t)pages };
	send_note(to, note);
	accept_connection(&good);
	wait_for_fault();
	/* This thread waits for the lock of the memory table. It must not block other connections. */
	NEED(pthread_create(&thread, NULL, register_memory, &stuck) == 0);
	note.port = 0;
	send_note(to, note);
	for (int i = 0; i < ROUNDS; i++)
		exchange_words(&good, "pong", "ping");
	NEED(read(from, &octet, 1) == 1);
	end_fault(pages);
	NEED(pthread_join(thread, NULL) == 0);
	/* After the fault, the Write takes effect, and the following Send arrives. */
	CODE(1, (int)next_completion(&stuck).wr_id);
	CHECK(strcmp(pages, "written") == 0);
	_exit(failures != 0);
}

int main(void)
{
	static struct peer stuck, good;
	struct ibv_send_wr wr = { .wr_id = 2, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED }, *bad;
	struct uffdio_api api = { .api = UFFD_API };
	int to_parent[2], to_child[2], status = 0;
	struct ibv_sge sge;
	struct note note;
	pid_t child;

	fault_fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (fault_fd < 0) {
		fprintf(stderr, "skipped: userfaultfd: %s\n", strerror(errno));
		return result();
	}
	NEED(pipe(to_parent) == 0 && pipe(to_child) == 0);
	child = fork();
	NEED(child >= 0);
	if (child == 0) {
		alarm(50);
		/* A userfaultfd descriptor covers the memory of the process that created it. */
		close(fault_fd);
		fault_fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
		NEED(fault_fd >= 0 && ioctl(fault_fd, UFFDIO_API, &api) == 0);
		serve(to_parent[1], to_child[0]);
	}
	alarm(50);
	connect_to_port(&stuck, receive_note(to_parent[0]).port);
	note = receive_note(to_parent[0]);
	connect_to_port(&good, note.port);
	snprintf(stuck.buffer + 2048, 64, "written");
	sge = (struct ibv_sge){ (uintptr_t)stuck.buffer + 2048, 64, stuck.mr->lkey };
	wr.sg_list = &sge;
	wr.wr.rdma.remote_addr = note.addr;
	wr.wr.rdma.rkey = note.rkey;
	NEED(ibv_post_send(stuck.id->qp, &wr, &bad) == 0);
	receive_note(to_parent[0]);
	for (int i = 0; i < ROUNDS; i++)
		exchange_words(&good, "ping", "pong");
	CODE(2, (int)next_completion(&stuck).wr_id);
	send_word(&stuck, "behind");
	NEED(write(to_child[1], "e", 1) == 1);
	NEED(waitpid(child, &status, 0) == child);
	CODE(0, status);
	return result();
}
