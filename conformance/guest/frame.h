/* Frames of MPA start-up, for peers with plain TCP. */
#ifndef FRAME_H
#define FRAME_H

#include <sys/socket.h>

/* The header: key, flags, revision, and length of the private data. */
struct frame {
	char key[16];
	unsigned char flags, revision;
	unsigned char high, low;
	char data[512];
};
#define HEAD 20

static inline int data_octets(const struct frame *frame)
{
	return frame->high << 8 | frame->low;
}

/* Reads a frame with its private data. Returns 0 if it is complete. A read of zero octets would
 * wait for further data. */
static inline int read_frame(int s, struct frame *frame)
{
	int octets;

	if (recv(s, frame, HEAD, MSG_WAITALL) != HEAD)
		return -1;
	octets = data_octets(frame);
	if (octets > (int)sizeof frame->data || (octets && recv(s, frame->data, (size_t)octets,
			MSG_WAITALL) != octets))
		return -1;
	return 0;
}

#endif
