B
past_valueJ€Â½N¶gF‹Eæ˜«’*;¥4)ÂxMH=³³¨L„†l§T—Í='è¸˜l5Ó>»ZV¶j|JF˜J©Ù§«¤¶bŽU®$YÇšj$MLJKë˜8ZKr|~n·]ÖE½ÅÇ×]RÂÌÛIºÌ^®íÙDWªJIÌ)YG«~:sŠjfyB”$£ÛjãJ6S